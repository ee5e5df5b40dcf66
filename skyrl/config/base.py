"""What every group of settings shares, and plain-data views of a config.

A setting is a dataclass field with the sentence that documents it right below. ``field_help`` reads these
sentences, so the reference page, the tests and a reader of the source see the same text.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
from dataclasses import dataclass
from functools import cache
from typing import Any, Self, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from skyrl.errors import ConfigError


@dataclass
class BaseConfig:
    """A group of settings. Keys added with ``+group.key=value`` become extra attributes of the instance."""

    @classmethod
    def from_dict_config(cls, config: DictConfig) -> Self:
        """Build an instance from parsed settings; keys that ``config`` leaves out keep their defaults.

        Raises:
            ConfigError: a key is unknown or a value has the wrong type.
        """
        try:
            return cast(Self, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), config)))
        except OmegaConfBaseException as error:
            raise ConfigError(f"{cls.__name__}: {error}") from error


def get_config_as_dict(config: Any) -> Any:
    """Turn a config, or any value inside one, into plain dicts, lists and scalars; added keys are included."""
    if isinstance(config, DictConfig):
        return OmegaConf.to_container(config, resolve=True)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {name: get_config_as_dict(value) for name, value in vars(config).items()}
    if isinstance(config, dict):
        return {key: get_config_as_dict(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [get_config_as_dict(value) for value in config]
    return config


def get_config_as_yaml_str(config: Any) -> str:
    """Return a config as YAML text that ``OmegaConf.create`` reads back to the same values."""
    return str(OmegaConf.to_yaml(OmegaConf.create(get_config_as_dict(config))))


@cache
def field_help(cls: type) -> dict[str, str]:
    """Return the documentation of each field of a dataclass, those of its bases included, by field name."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            texts |= _own_field_help(base)
    return texts


def _own_field_help(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # a class made at run time, such as by make_config, has no source
        return {}
    body = cast(ast.ClassDef, ast.parse(source).body[0]).body
    texts = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            value = text.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[field.target.id] = inspect.cleandoc(value.value)
    return texts
