"""MaxRL: a rollout against its group, in units of the group's mean score."""

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


@register_advantage_estimator("maxrl")
def maxrl_advantages(
    token_level_rewards: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    index: Sequence[str] | np.ndarray,
    *,
    epsilon: float = 1e-6,
    valid_rows: Bool[Tensor, " batch"] | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """A_i = (s_i - mean) / (mean + ε) within the group: rare successes weigh more (arXiv:2602.02710, algorithm 1).

    For scores that are not negative. A mean of exactly -ε has no quotient: 0. A group of one keeps its score.
    Returns equal advantages.
    """
    shown = shown_tokens(response_mask, valid_rows)
    scores = row_scores(token_level_rewards, shown)
    stats = group_stats(scores, *group_index(index, valid_rows))
    divisor = stats.mean + epsilon
    relative = torch.where(divisor == 0, 0.0, stats.centred / divisor)
    advantage = torch.where(stats.size == 1, scores.double(), relative)
    advantages = spread_over_tokens(advantage, token_level_rewards, shown)
    return advantages, advantages
