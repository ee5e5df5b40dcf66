"""pass@k advantage: what a rollout adds to the chance that one of k succeeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from skyrl.algorithms.advantages.outcome import row_scores, shown_tokens, spread_over_tokens
from skyrl.algorithms.advantages.registry import register_advantage_estimator
from skyrl.algorithms.groups import group_index, group_sum
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.errors import ConfigError


@register_advantage_estimator("pass_at_k", replaceable=True)
def pass_at_k_advantages(
    token_level_rewards: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    index: Sequence[str] | np.ndarray,
    config: AlgorithmConfig,
    *,
    valid_rows: Bool[Tensor, " batch"] | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """The mean advantage of a row over all subsets of k rows of its group that hold it (arXiv:2508.10751).

    A score above 0 passes. A subset's reward is 1 when one of its rows passes; over the subsets it has the mean
    R = 1 - C(F,k)/C(N,k), with F failed of N rows, and σ = √(R(1-R)). Passed rows get (1 - R)/σ, failed ones
    (1 - R - C(F-1,k-1)/C(N-1,k-1))/σ. σ = 0 gives 0: all subsets pass, or none does. That is so, too, in a group
    of fewer than k rows, which is its own only subset. Returns equal advantages.

    Raises:
        ConfigError: `trainer.algorithm.pass_at_k` is less than 1.
    """
    if config.pass_at_k < 1:
        raise ConfigError(f"trainer.algorithm.pass_at_k={config.pass_at_k} must be at least 1; try 4")
    shown = shown_tokens(response_mask, valid_rows)
    passed = row_scores(token_level_rewards, shown) > 0
    groups, num_groups = group_index(index, valid_rows)
    rows = group_sum(torch.ones_like(passed, dtype=torch.float64), groups, num_groups)
    failed = group_sum((~passed).double(), groups, num_groups)
    k = rows.clamp(max=config.pass_at_k)
    none_passes = _share_of_subsets(failed, rows, k)
    spread = (none_passes * (1 - none_passes)).sqrt()
    scale = torch.where(spread > 0, 1 / spread, 0.0)
    of_passed = none_passes * scale
    of_failed = (none_passes - _share_of_subsets(failed - 1, rows - 1, k - 1)) * scale
    advantage = torch.where(passed, of_passed[groups], of_failed[groups])
    advantages = spread_over_tokens(advantage, token_level_rewards, shown)
    return advantages, advantages


def _share_of_subsets(
    part: Float[Tensor, " groups"], whole: Float[Tensor, " groups"], size: Float[Tensor, " groups"]
) -> Float[Tensor, " groups"]:
    """Return C(part, size) / C(whole, size), 0 where `part` is smaller than `size`; from logarithms of factorials."""
    fits = part >= size
    part = torch.where(fits, part, whole)
    logs = [torch.lgamma(number + 1) for number in (part, whole, whole - size, part - size)]
    log_share = (logs[0] - logs[1]) + (logs[2] - logs[3])
    return torch.where(fits, log_share.clamp(max=0.0).exp(), 0.0)
