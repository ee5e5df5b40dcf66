"""The table of environments, and making one from its id.

The table belongs to the process: with Ray, call `register` inside the remote task that makes the environments.
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from skyrl_gym import error
from skyrl_gym.core import Env

EnvCreator = Callable[..., Env[Any, Any]]


@dataclass
class EnvSpec:
    """How to make an environment.

    Example: `EnvSpec("gsm8k", "skyrl_gym.envs.gsm8k.env:GSM8kEnv")`.
    """

    id: str
    """Any text; nothing is read from its form."""
    entry_point: EnvCreator | str | None = None
    """`"module:attribute"`, or something to call."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Defaults for the constructor. `make` copies them deeply, so they must be copyable."""
    name: str = field(init=False)
    """The id."""

    def __post_init__(self) -> None:
        self.name = self.id

    def make(self, **kwargs: Any) -> Env[Any, Any]:
        """Same as `skyrl_gym.make(spec, **kwargs)`."""
        return make(self, **kwargs)

    def to_json(self) -> str:
        """Return the entry as JSON.

        Raises:
            ValueError: The entry point or a keyword argument is callable, so it has no text form.
        """
        for key, value in {"entry_point": self.entry_point, **self.kwargs}.items():
            if callable(value):
                raise ValueError(f"environment {self.id!r}: {key} is callable and cannot be written as JSON")
        return json.dumps({"id": self.id, "entry_point": self.entry_point, "kwargs": self.kwargs})

    @staticmethod
    def from_json(text: str) -> EnvSpec:
        """Read what `to_json` wrote.

        Raises:
            ValueError: The text does not describe an entry.
        """
        try:
            return EnvSpec(**json.loads(text))
        except (TypeError, ValueError) as cause:
            raise ValueError(f"not an environment entry: {text!r}") from cause

    def pprint(self, disable_print: bool = False, include_entry_points: bool = False) -> str | None:
        """Print the entry, or return the text when `disable_print` is set."""
        text = f"id={self.id}"
        if include_entry_points:
            text += f"\nentry_point={self.entry_point}"
        return _print_or_return(text, disable_print)


registry: dict[str, EnvSpec] = {}
"""All registered environments of this process."""


def register(
    id: str,
    entry_point: EnvCreator | str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    force: bool = False,
) -> None:
    """Add an environment to the table.

    Args:
        id: Its name.
        entry_point: `"module:attribute"`, or something to call.
        kwargs: Defaults for the constructor; must be copyable.
        force: Replace an entry of the same name; for notebooks that run a cell twice.

    Raises:
        AssertionError: There is no entry point.
        RegistrationError: The id is taken.
    """
    assert entry_point is not None, f"environment {id!r}: an entry point is required"
    if id in registry and not force:
        raise error.RegistrationError(f"environment {id!r} is registered already; pick another id or deregister it")
    registry[id] = EnvSpec(id=id, entry_point=entry_point, kwargs=dict(kwargs or {}))


def deregister(id: str) -> None:
    """Remove an environment from the table; raises `Error` when it is unknown."""
    if id not in registry:
        raise error.Error(f"environment {id!r} is not registered")
    del registry[id]


def spec(id: str) -> EnvSpec:
    """Return the entry of an id; raises `Error` when it is unknown."""
    if id not in registry:
        raise error.Error(f"environment {id!r} is not registered; skyrl_gym.pprint_registry() lists what is")
    return registry[id]


def load_env_creator(name: str) -> EnvCreator:
    """Import `"module:attribute"`."""
    module_name, _, attribute = name.partition(":")
    creator: EnvCreator = getattr(importlib.import_module(module_name), attribute)
    return creator


def make(id: str | EnvSpec, **kwargs: Any) -> Env[Any, Any]:
    """Make an environment.

    Args:
        id: A registered id, or an entry.
        **kwargs: Override the entry's own keyword arguments. Environments take `env_config` and `extras`.

    Raises:
        Error: The id is unknown, or the entry has no entry point.
        TypeError: The constructor does not take the arguments, or returned something else than an `Env`.
    """
    env_spec = id if isinstance(id, EnvSpec) else spec(id)
    if env_spec.entry_point is None:
        raise error.Error(f"environment {env_spec.id!r} has no entry point")
    merged = {**copy.deepcopy(env_spec.kwargs), **kwargs}
    entry_point = env_spec.entry_point
    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    try:
        env = creator(**merged)
    except TypeError as cause:
        raise TypeError(f"environment {env_spec.id!r} could not be made with {merged!r}: {cause}") from cause
    if not isinstance(env, Env):
        raise TypeError(f"environment {env_spec.id!r}: the entry point made a {type(env).__name__}, not an Env")
    env.spec = replace(env_spec, kwargs=merged)
    return env


def pprint_registry(
    print_registry: Mapping[str, EnvSpec] = registry, *, num_cols: int = 3, disable_print: bool = False
) -> str | None:
    """Print the ids in columns, sorted, or return the text when `disable_print` is set."""
    ids = sorted(print_registry)
    width = max(map(len, ids), default=0)
    rows = [ids[start : start + num_cols] for start in range(0, len(ids), num_cols)]
    text = "\n".join(" ".join(name.ljust(width) for name in row).rstrip() for row in rows)
    return _print_or_return(text, disable_print)


def _print_or_return(text: str, disable_print: bool) -> str | None:
    if disable_print:
        return text
    sys.stdout.write(text + "\n")
    return None
