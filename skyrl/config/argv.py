"""Command-line arguments, brought into the form that Hydra reads.

Recipes written for a YAML command line hold values that Hydra's grammar refuses, such as JSON mappings and
``train[:200]``. ``normalise_token`` rewrites exactly those; every token that Hydra reads stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from yaml import YAMLError

_FLAGS_WITH_VALUE = {
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
    "--experimental-rerun",
}
_INFO_FLAGS = {"--info", "-i"}
_INFO_TOPICS = {"all", "config", "defaults", "defaults-tree", "plugins", "searchpath"}
_BARE_STRING = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*\Z")
_KEYWORDS = {"null", "true", "false", "inf", "nan"}
_ENTRYPOINT = re.compile(r"\+{0,2}trainer\.override_entrypoint=(.*)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """A command line, split, so that flags may stand anywhere.

    Example:
        >>> split_argv(["a=1", "--cfg", "job", "b=2"])
        Arguments(flags=['--cfg', 'job'], overrides=['a=1', 'b=2'])
    """

    flags: list[str]
    """Hydra's flags, each followed by its value."""
    overrides: list[str]
    """All other tokens, in order."""

    @property
    def is_multirun(self) -> bool:
        """Whether the command line asks for a sweep."""
        return any(flag in {"-m", "--multirun"} for flag in self.flags)


def split_argv(argv: Iterable[str]) -> Arguments:
    """Separate Hydra's flags from overrides; Hydra itself wants all overrides in one piece."""
    flags: list[str] = []
    overrides: list[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        if not token.startswith("-"):
            overrides.append(token)
            continue
        flags.append(token)
        takes_next = token in _FLAGS_WITH_VALUE or (token in _INFO_FLAGS and tokens and tokens[0] in _INFO_TOPICS)
        if takes_next and tokens:
            flags.append(tokens.pop(0))
    return Arguments(flags=flags, overrides=overrides)


def pop_override_entrypoint(argv: Iterable[str]) -> tuple[str | None, list[str]]:
    """Return the module that ``trainer.override_entrypoint=<module>`` names, the last one, and the other tokens."""
    module, rest = None, []
    for token in argv:
        if match := _ENTRYPOINT.match(token):
            module = match.group(1).strip("'\"")
        else:
            rest.append(token)
    return (None if module in {None, "", "null"} else module), rest


def is_hydra_token(token: str) -> bool:
    """Whether Hydra's grammar reads the token."""
    try:
        OverridesParser.create().parse_override(token)
    except HydraException:
        return False
    return True


def is_sweep_of(token: str, key: str) -> bool:
    """Whether the token gives ``key`` several values, as in ``trainer.seed=1,2``."""
    if not is_hydra_token(token):
        return False
    override = OverridesParser.create().parse_override(token)
    return override.key_or_group == key and bool(override.is_sweep_override())


def normalise_token(token: str) -> str:
    """Rewrite ``key=value`` for Hydra, reading the value as YAML, if Hydra cannot read it as it stands.

    Idempotent. A token that no reading makes valid is returned unchanged, for Hydra to report.

    Example:
        >>> normalise_token("dataset_split=train[:200]")
        "dataset_split='train[:200]'"
    """
    if token.startswith("-") or "=" not in token or is_hydra_token(token):
        return token
    key, text = token.split("=", 1)
    try:
        rewritten = f"{key}={to_hydra_value(_read_yaml(text))}"
    except (YAMLError, ValueError):
        rewritten = f"{key}={to_hydra_value(text)}"
    return rewritten if is_hydra_token(rewritten) else token


def _read_yaml(text: str) -> Any:
    """Read a value as YAML does; plain text stays whole, with what YAML would take for a comment."""
    parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    value = parsed["value"]  # type: ignore[index, call-overload]
    return text if isinstance(value, str) and not text.startswith(("'", '"')) else value


def to_hydra_value(value: Any) -> str:
    """Write a plain value in Hydra's grammar, so that Hydra reads the same value with the same type.

    Raises:
        ValueError: a mapping has a key that Hydra's grammar cannot hold.

    Example:
        >>> to_hydra_value({"a": [None, True, 1e-6], "b": "true"})
        "{a:[null,true,1e-06],b:'true'}"
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_hydra_key(key)}:{to_hydra_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(to_hydra_value(item) for item in value) + "]"
    text = str(value)
    if _BARE_STRING.match(text) and text.lower() not in _KEYWORDS:
        return text
    return str(QuotedString(text=text, quote=Quote.single).with_quotes())


def _hydra_key(key: Any) -> str:
    if isinstance(key, bool | int | float):
        return to_hydra_value(key)
    if isinstance(key, str) and _BARE_STRING.match(key) and key.lower() not in _KEYWORDS:
        return key
    raise ValueError(f"the mapping key {key!r} cannot be written on the command line; put the mapping into a file")


def tokens_from_dict(overrides: Mapping[str, Any]) -> list[str]:
    """Turn ``{"a.b": value}`` into override tokens that keep each value's type.

    Example:
        >>> tokens_from_dict({"trainer.run_name": "true", "trainer.critic.model.path": None})
        ["trainer.run_name='true'", 'trainer.critic.model.path=null']
    """
    return [f"{key}={to_hydra_value(value)}" for key, value in overrides.items()]
