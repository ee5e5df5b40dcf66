"""From override tokens to a typed config: Hydra composes, this module registers the root and explains refusals."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import YAMLError

from skyrl.config.argv import is_hydra_token, normalise_token, tokens_from_dict
from skyrl.config.base import BaseConfig
from skyrl.config.legacy import translate_legacy
from skyrl.config.presets import explain_missing, explain_preset_token, join_presets, register_resolvers
from skyrl.config.schema import describe_type, is_declared, structured_node, suggest
from skyrl.errors import ConfigError

CONFIG_MODULE = "skyrl.config"
"""Package in whose folder Hydra finds the presets."""
FREE_GROUPS = ("environment.skyrl_gym.",)
"""Where users add groups of their own, so that a name close to a declared one is no typo."""


@dataclass
class RootConfig(BaseConfig):
    """The top of a config tree: it can be composed from a command line."""

    STORE_NAME: ClassVar[str] = "skyrl"
    """Name of the root in Hydra's config store, for ``defaults: [NAME, _self_]`` in files."""
    SOURCES: ClassVar[Mapping[str, str]] = {}
    """Keys without a default of their own, and the keys whose values they take."""
    LOG_KEY: ClassVar[str] = "log_path"
    """Key of the folder under which Hydra may write."""
    JOB_KEYS: ClassVar[tuple[str, ...]] = ()
    """Keys of names, and of folders (ending in ``_path`` or ``_dir``), that two jobs of a sweep must not share."""

    def finalize(self) -> Self:
        """Set what follows from other settings, in place. Idempotent."""
        return self

    @classmethod
    def from_cli_overrides(cls, overrides: Sequence[str] | Mapping[str, Any]) -> Self:
        """Compose a config, the same way as the command line does.

        Args:
            overrides: tokens of the command line (``["trainer.seed=1"]``), or ``{"trainer.seed": 1}`` whose values
                keep their type.

        Raises:
            ConfigError: a key is unknown or a value has the wrong type.
        """
        tokens = tokens_from_dict(overrides) if isinstance(overrides, Mapping) else list(overrides)
        return compose_config(cls, prepare_tokens(cls, tokens))


Root = TypeVar("Root", bound=RootConfig)


_NODES: dict[type[RootConfig], DictConfig] = {}


def root_node(cls: type[RootConfig]) -> DictConfig:
    """Return the node of a root class, built once; readers must not change it (Hydra copies it)."""
    if cls not in _NODES:
        _NODES[cls] = structured_node(cls, cls.SOURCES)
    return _NODES[cls]


def register(cls: type[RootConfig]) -> None:
    """Make ``cls`` the root that Hydra finds under ``cls.STORE_NAME``, with what presets compute."""
    register_resolvers()
    ConfigStore.instance().store(name=cls.STORE_NAME, node=root_node(cls))


def prepare_tokens(cls: type[RootConfig], tokens: Iterable[str]) -> list[str]:
    """Translate old keys, rewrite values for Hydra, join presets, and refuse additions that look like a misspelt group.

    Raises:
        ConfigError: an old key has no meaning any more, or a ``+key`` misspells its parent.
    """
    prepared = join_presets([normalise_token(token) for token in translate_legacy(tokens)])
    node = root_node(cls)
    for override in _parse(prepared):
        if override.is_force_add() or not override.is_add() or override.key_or_group.startswith(FREE_GROUPS):
            continue
        key = override.key_or_group
        *parents, _ = key.split(".")
        if not parents or is_declared(node, ".".join(parents)):
            continue
        meant = suggest(node, key, cutoff=0.8)
        if meant is not None and meant != key:
            raise ConfigError(f"+{key} would add a new group; did you mean {meant}? (++{key} adds it anyway)")
    return prepared


def compose_config(cls: type[Root], tokens: Sequence[str]) -> Root:
    """Compose prepared tokens onto the root and return the finalized config.

    Raises:
        ConfigError: a key is unknown or a value has the wrong type.
    """
    register(cls)
    try:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            config: Root = to_typed(compose(cls.STORE_NAME, overrides=list(tokens)))
            return config.finalize()
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise explain(error, cls, tokens) from error


def to_typed(composed: DictConfig) -> Any:
    """Turn a composed node into instances of its dataclasses, not finalized yet."""
    return OmegaConf.to_object(composed)


def take_sources(config: RootConfig) -> None:
    """Give each unset key of ``SOURCES`` its source's value; composed configs have it already."""
    for key, source in config.SOURCES.items():
        *parents, name = key.split(".")
        group = functools.reduce(getattr, parents, config)
        if getattr(group, name) is None:
            setattr(group, name, functools.reduce(getattr, source.split("."), config))


def _parse(tokens: Iterable[str]) -> Iterator[Override]:
    return (OverridesParser.create().parse_override(token) for token in tokens if is_hydra_token(token))


def explain(error: Exception, cls: type[RootConfig], tokens: Iterable[str]) -> ConfigError:
    """Say what Hydra or OmegaConf refused: the key, the value, the need, and for a typo the key that was meant."""
    overrides = list(_parse(tokens))
    if isinstance(error, MissingConfigException) and (text := explain_missing(error)) is not None:
        return ConfigError(text)
    cause = next((link for link in _chain(error) if isinstance(link, OmegaConfBaseException)), None)
    node = root_node(cls)
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key:
        return ConfigError(_unknown_key(cause.full_key, node, overrides))
    if isinstance(cause, ValidationError) and cause.full_key:
        return ConfigError(_wrong_type(cause, overrides))
    if isinstance(cause, ConfigTypeError) and "deletion" in str(cause):
        return ConfigError(f"~{cause.full_key}: a declared key cannot be deleted; set it to another value, or null")
    if (text := explain_preset_token(overrides) or _sweep(overrides)) is not None:
        return ConfigError(text)
    for override in overrides:
        if override.is_delete() and not is_declared(node, override.key_or_group):
            return ConfigError(_unknown_key(override.key_or_group, node, []))
    return ConfigError(str(error).strip())


def _sweep(overrides: Iterable[Override]) -> str | None:
    """Explain the first token with several values, which Hydra takes for the runs of a sweep."""
    for override in overrides:
        if override.is_sweep_override():
            written = (override.input_line or "").strip()
            key, _, values = written.partition("=")
            return (
                f"{written}: a comma outside brackets makes a sweep, which needs --multirun; "
                f"for a list write '{key}=[{values}]'"
            )
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _unknown_key(key: str, node: DictConfig, overrides: list[Override]) -> str:
    """Name the whole key that the user wrote: OmegaConf stops at the first unknown segment."""
    written = [override.key_or_group for override in overrides if f"{override.key_or_group}.".startswith(f"{key}.")]
    key = written[0] if written else key
    meant = suggest(node, key)
    if meant is not None and meant != key:
        return f"unknown key {key}; did you mean {meant}?"
    return f"unknown key {key}; `--cfg job` prints all keys, and +{key}=VALUE adds a key of your own"


def _wrong_type(cause: ValidationError, overrides: list[Override]) -> str:
    key = cause.full_key
    deeper = [override.key_or_group for override in overrides if override.key_or_group.startswith(f"{key}.")]
    if deeper:
        return f"unknown key {deeper[0]}; {key} is a single value"
    owner = cause.object_type
    hints = typing.get_type_hints(owner) if isinstance(owner, type) else {}
    need = describe_type(hints.get(str(cause.key), Any))
    written = [override for override in overrides if override.key_or_group == key]
    value = written[-1].get_value_element_as_str() if written else repr(getattr(cause, "value", None))
    return f"{key}={value}: must be {need}"
