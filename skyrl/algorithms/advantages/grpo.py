"""GRPO: a rollout against the others of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from skyrl.algorithms.advantages.outcome import row_scores, shown_tokens, spread_over_tokens
from skyrl.algorithms.advantages.registry import register_advantage_estimator
from skyrl.algorithms.groups import group_index, group_stats


@register_advantage_estimator("grpo")
def grpo_advantages(
    token_level_rewards: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    index: Sequence[str] | np.ndarray,
    *,
    grpo_norm_by_std: bool = True,
    epsilon: float = 1e-6,
    valid_rows: Bool[Tensor, " batch"] | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """A_i = (s_i - mean) / (std + ε) within the group (arXiv:2402.03300, section 4.1.2); std has ddof 1.

    `grpo_norm_by_std=False` leaves the division out (Dr.GRPO, arXiv:2503.20783). A group of one has
    mean 0 and std 1. Returns equal advantages.
    """
    shown = shown_tokens(response_mask, valid_rows)
    scores = row_scores(token_level_rewards, shown)
    stats = group_stats(scores, *group_index(index, valid_rows))
    alone = stats.size == 1
    advantage = torch.where(alone, scores.double(), stats.centred)
    if grpo_norm_by_std:
        advantage = advantage / (torch.where(alone, 1.0, stats.std) + epsilon)
    advantages = spread_over_tokens(advantage, token_level_rewards, shown)
    return advantages, advantages
