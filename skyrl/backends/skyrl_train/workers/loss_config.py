"""Overrides of the algorithm config for one call, on a copy: the shared config never changes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from skyrl.config.algorithm import AlgorithmConfig
from skyrl.errors import ConfigError


def effective_loss(
    algorithm: AlgorithmConfig, loss_fn: str | None = None, loss_fn_config: Mapping[str, Any] | None = None
) -> tuple[str, AlgorithmConfig]:
    """The loss's name and the config that it sees; the config names that loss, too.

    Args:
        algorithm: `trainer.algorithm`.
        loss_fn: Overrides `policy_loss_type`.
        loss_fn_config: Overrides of fields, nested ones as nested mappings.

    Raises:
        ConfigError: An override names no field.
    """
    name = loss_fn or algorithm.policy_loss_type
    merged = copy.deepcopy(algorithm)
    merge_into(merged, loss_fn_config or {}, "loss_fn_config")
    merged.policy_loss_type = name
    return name, merged


def merge_into(config: Any, overrides: Mapping[str, Any], path: str) -> None:
    """Set fields of a dataclass in place, nested ones by nested mappings.

    Raises:
        ConfigError: Names the unknown field.
    """
    for name, value in overrides.items():
        if name not in vars(config):
            raise ConfigError(f"{path}.{name} is no field of {type(config).__name__}; there are {sorted(vars(config))}")
        current = vars(config)[name]
        if dataclasses.is_dataclass(current) and isinstance(value, Mapping):
            merge_into(current, value, f"{path}.{name}")
        else:
            setattr(config, name, value)
