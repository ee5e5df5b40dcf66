"""Presets (``+recipe=NAME``): their names, several at once, and what they compute with."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import resources

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from skyrl.config.argv import is_hydra_token

PRESET_GROUP = "recipe"
"""Folder of the presets, beside this module."""


def preset_names() -> list[str]:
    """Return the names of the presets that the library ships, in alphabetical order."""
    folder = resources.files("skyrl.config") / PRESET_GROUP
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def register_resolvers() -> None:
    """Teach OmegaConf what presets compute with: ``${skyrl_share:0.2,${a.b}}``."""
    OmegaConf.register_new_resolver("skyrl_share", share_of, replace=True)


def share_of(share: float, whole: int) -> int:
    """Return a share of a number of tokens, rounded, at least 1.

    Example:
        >>> share_of(0.2, 1024)
        205
    """
    return max(1, round(share * whole))


def join_presets(tokens: Sequence[str]) -> list[str]:
    """Make one token of several ``+recipe=...``, which Hydra takes only once; later presets win.

    A preset that is named again moves to its last place. Sweeps (``+recipe=a,b`` with ``-m``) are left to Hydra.

    Example:
        >>> join_presets(["+recipe=quickstart", "a=1", "+recipe=dapo"])
        ['+recipe=[quickstart,dapo]', 'a=1']
    """
    named = {position: _named(token) for position, token in enumerate(tokens) if token.startswith(f"+{PRESET_GROUP}=")}
    if len(named) < 2 or any(names is None for names in named.values()):
        return list(tokens)
    in_order = [name for names in named.values() if names is not None for name in names]
    last_places = list(dict.fromkeys(reversed(in_order)))[::-1]
    first = min(named)
    joined = {first: f"+{PRESET_GROUP}=[{','.join(last_places)}]"}
    return [
        joined.get(position, token)
        for position, token in enumerate(tokens)
        if position not in named or position == first
    ]


def _named(token: str) -> list[str] | None:
    """Return the presets of one token; None for a sweep and for what Hydra cannot read."""
    if not is_hydra_token(token):
        return None
    override = OverridesParser.create().parse_override(token)
    if override.is_sweep_override():
        return None
    value = override.value()
    return [str(name) for name in value] if isinstance(value, list) else [str(value)]


def explain_preset_token(overrides: Sequence[Override]) -> str | None:
    """Explain a preset that is named without its single plus, or several without brackets."""
    for override in overrides:
        if override.key_or_group != PRESET_GROUP:
            continue
        written = (override.input_line or "").strip()
        names = written.partition("=")[2] or "NAME"
        names = f"[{names}]" if override.is_sweep_override() else names
        if override.is_sweep_override() or override.is_force_add() or not override.is_add():
            return f"{written}: presets are added by name; write '+{PRESET_GROUP}={names}'"
    return None


def explain_missing(error: MissingConfigException) -> str | None:
    """Say which presets there are, if the file that Hydra did not find is one."""
    folder, _, name = (error.missing_cfg_file or "").removesuffix(".yaml").rpartition("/")
    if folder != PRESET_GROUP:
        return None
    close = difflib.get_close_matches(name, preset_names(), n=1)
    advice = f"; did you mean {close[0]}?" if close else ""
    return f"+{PRESET_GROUP}={name}: there is no such preset; the library has {', '.join(preset_names())}{advice}"
