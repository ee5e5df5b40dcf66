"""The checks that every section uses: one of several names, and bounds of a number."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable

from skyrl.errors import ConfigError


def require_choice(key: str, value: str | None, choices: Collection[str | None]) -> None:
    """Raise ConfigError unless ``value`` is one of ``choices``; a close one is suggested."""
    if value in choices:
        return
    names = ["null" if choice is None else choice for choice in choices]
    close = difflib.get_close_matches(str(value), names, n=1)
    advice = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(f"{key}={value}: must be one of {', '.join(names)}{advice}")


def require_at_least(key: str, value: float | None, least: float, unless: Iterable[float | None] = ()) -> None:
    """Raise ConfigError unless ``value`` is at least ``least`` or one of the exceptions in ``unless``."""
    if value in set(unless):
        return
    if value is None or math.isnan(value) or value < least:
        exceptions = "".join(f", or {'null' if item is None else f'{item:g}'}" for item in unless)
        raise ConfigError(f"{key}={_show(value)}: must be at least {least:g}{exceptions}")


def require_positive(key: str, value: float | None) -> None:
    """Raise ConfigError unless ``value`` is above 0."""
    if value is None or not value > 0:
        raise ConfigError(f"{key}={_show(value)}: must be above 0")


def require_share(key: str, value: float) -> None:
    """Raise ConfigError unless ``value`` lies between 0 and 1."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{key}={value}: must lie between 0 and 1")


def _show(value: float | None) -> str:
    return "null" if value is None else str(value)
