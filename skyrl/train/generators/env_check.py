"""Whether the environments that the data names are registered, before anything slow starts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import skyrl_gym
from skyrl.errors import ConfigError, DatasetError


def check_environments(default: str | None, rows: Iterable[tuple[str, str | None]]) -> None:
    """Look up every environment that a run will make in this process's registry.

    Args:
        default: `environment.env_class`, for rows that name none.
        rows: Where a row names its environment, for messages, and the name; ("rows.jsonl, row 3, ...", None) names
            none.

    Raises:
        ConfigError: The default is unknown, or a row needs it and it is null.
        DatasetError: A row names an unknown environment.
    """
    if default and default not in skyrl_gym.registry:
        raise ConfigError(f"environment.env_class={default}: {_advice(default)}")
    for place, name in rows:
        if not name and not default:
            raise ConfigError(
                f"environment.env_class=null, and {place} names no environment; set the key, or add the "
                "column to the data"
            )
        if name and name not in skyrl_gym.registry:
            raise DatasetError(f"{place}: no environment {name!r}: {_advice(name)}")


def _advice(name: str) -> str:
    known = sorted(skyrl_gym.registry)
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"; did you mean {close[0]}?" if close else ""
    return (
        f"must be one of {', '.join(known)}, or an environment that the experiment's __init__ registers with "
        f"skyrl_gym.register{guess}"
    )
