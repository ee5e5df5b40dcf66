"""GDPO: several rewards, each normalised in the group before they are added."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from skyrl.algorithms.advantages.checks import refuse_non_finite
from skyrl.algorithms.advantages.outcome import row_mean, row_std, shown_tokens, spread_over_tokens
from skyrl.algorithms.advantages.registry import register_advantage_estimator
from skyrl.algorithms.groups import group_index, group_stats
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.errors import ConfigError


@register_advantage_estimator("gdpo", replaceable=True)
def gdpo_advantages(
    token_level_rewards: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    index: Sequence[str] | np.ndarray,
    config: AlgorithmConfig,
    *,
    epsilon: float = 1e-6,
    valid_rows: Bool[Tensor, " batch"] | None = None,
    reward_components: Mapping[str, Float[Tensor, " batch"]] | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """z_c = (r_c - mean) / (std + ε) in the group for each reward c, A = Σ_c w_c·z_c, then A over the batch.

    The last step is (A - mean) / (std + ε) over all rows that did not fail; every std has ddof 1
    (arXiv:2601.05242). Rewards of different size then count the same, and combinations that have an equal sum stay
    apart. `token_level_rewards` give only shape and type. A group of one, or of equal rewards, has z = 0.
    Returns equal advantages.

    Raises:
        ConfigError: There are no components, or `trainer.algorithm.reward_weights` names one that nobody reports.
        ValueError: A component of a row that did not fail is not finite.
    """
    weights = _weights(config.reward_weights or {}, reward_components)
    shown = shown_tokens(response_mask, valid_rows)
    groups, num_groups = group_index(index, valid_rows)
    total = torch.zeros(len(groups), dtype=torch.float64, device=token_level_rewards.device)
    for name, weight in weights.items():
        component = _component(name, (reward_components or {})[name], valid_rows)
        stats = group_stats(component, groups, num_groups)
        total += weight * stats.centred / (stats.std + epsilon)
    advantage = (total - row_mean(total, valid_rows)) / (row_std(total, valid_rows) + epsilon)
    advantages = spread_over_tokens(advantage, token_level_rewards, shown)
    return advantages, advantages


def _weights(configured: Mapping[str, Any], components: Mapping[str, Tensor] | None) -> dict[str, float]:
    """Return the weight of each reward that environments report."""
    if not components:
        raise ConfigError(
            "trainer.algorithm.advantage_estimator=gdpo needs reward components, and this batch has none; let the "
            'environment return metadata["rewards"] = {name: value} in its steps, or choose another estimator'
        )
    for name in configured:
        if name not in components:
            near = difflib.get_close_matches(name, components, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"trainer.algorithm.reward_weights.{name}={configured[name]} weighs a reward that no environment "
                f"reports.{hint} Reported: {', '.join(sorted(components))}"
            )
    return {name: float(configured.get(name, 1.0)) for name in components}


def _component(
    name: str, values: Float[Tensor, " batch"], valid_rows: Bool[Tensor, " batch"] | None
) -> Float[Tensor, " batch"]:
    valid = torch.ones_like(values, dtype=torch.bool) if valid_rows is None else valid_rows
    refuse_non_finite(f"reward_components[{name!r}]", values, valid)
    return torch.where(valid, values, 0.0)
