"""Call users' functions with what they take, and check what they are given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from skyrl.errors import ConfigError

_BY_NAME = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


def named_keywords(function: Callable[..., Any]) -> frozenset[str]:
    """Return the parameters that a function names and that can be passed by keyword."""
    return frozenset(
        name for name, parameter in inspect.signature(function).parameters.items() if parameter.kind in _BY_NAME
    )


def _takes_any(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def accepted_keywords(function: Callable[..., Any], offered: Iterable[str]) -> list[str]:
    """Return which of the offered names a call may pass: those it names, or all where it takes `**kwargs`."""
    named, takes_any = named_keywords(function), _takes_any(function)
    return [name for name in offered if takes_any or name in named]


def require_call(
    what: str,
    function: Callable[..., Any],
    positional: Sequence[str],
    offered: Sequence[str],
    opt_in: Sequence[str],
) -> None:
    """Refuse a function that the library could not call.

    Args:
        what: Begins the error.
        function: A user's.
        positional: Names of what comes first, by position.
        offered: Keywords for those that take them.
        opt_in: Keywords for those that name them.

    Raises:
        ConfigError: It wants fewer or more than it would get; names both.
    """
    try:
        named, signature = named_keywords(function), inspect.signature(function)
    except ValueError:  # some builtins have none: the call itself will tell
        return
    keywords = [*accepted_keywords(function, offered), *(name for name in opt_in if name in named)]
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        raise ConfigError(
            f"{what} takes {signature}, but it is called as ({', '.join(positional)}, *, {', '.join(offered)}) and "
            f"may name {', '.join(opt_in)}: {error}"
        ) from error


def require_shape(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Refuse a tensor that is not shaped like another.

    Raises:
        ValueError: Names both tensors and both shapes.
    """
    if tensor.shape != other.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} but {other_name} has shape {tuple(other.shape)}; they must agree"
        )
