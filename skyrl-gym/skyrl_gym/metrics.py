"""Metrics of a batch of episodes, by the rules of their environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from skyrl_gym.aggregation import default_aggregate_metrics
from skyrl_gym.envs.registration import load_env_creator, registry

__all__ = ["aggregate_for_environment", "default_aggregate_metrics"]


def aggregate_for_environment(env_name: str, metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Aggregate with the static `aggregate_metrics` of the registered class.

    An entry point that is a plain function has no such method; its metrics are averaged
    (`default_aggregate_metrics`).

    Raises:
        ValueError: No environment of that name is registered.
    """
    if env_name not in registry:
        raise ValueError(f"environment {env_name!r} is not registered; known: {sorted(registry)}")
    entry_point = registry[env_name].entry_point
    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    aggregate: Callable[[list[dict[str, Any]]], dict[str, Any]] = default_aggregate_metrics
    if isinstance(creator, type):
        aggregate = getattr(creator, "aggregate_metrics", default_aggregate_metrics)
    return aggregate(list(metrics))
