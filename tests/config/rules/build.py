"""Configs for tests of rules, made without Hydra, which takes a tenth of a second each time."""

from __future__ import annotations

import copy
import functools

import yaml

from skyrl.config.root import SkyRLTrainConfig


@functools.cache
def _defaults(config_cls: type[SkyRLTrainConfig]) -> SkyRLTrainConfig:
    return config_cls().finalize()


def build(*tokens: str, config_cls: type[SkyRLTrainConfig] = SkyRLTrainConfig) -> SkyRLTrainConfig:
    """Return a finalized config with `a.b=value` applied in order; values are read as YAML."""
    config = copy.deepcopy(_defaults(config_cls))
    config.trainer.algorithm.temperature = None  # follows the sampling temperature again
    for token in tokens:
        path, text = token.split("=", 1)
        *groups, name = path.split(".")
        owner = functools.reduce(_child, groups, config)
        _set(owner, name, yaml.safe_load(text))
    return config.finalize()


def _child(owner: object, name: str) -> object:
    return owner.setdefault(name, {}) if isinstance(owner, dict) else getattr(owner, name)


def _set(owner: object, name: str, value: object) -> None:
    if isinstance(owner, dict):
        owner[name] = value
        return
    old = getattr(owner, name)  # raises for a key that does not exist
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    setattr(owner, name, float(value) if is_whole and isinstance(old, float) else value)
