"""RLOO: a rollout against the mean of the others of its group."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.advantages.outcome import row_scores, spread_over_tokens
from skyrl.algorithms.advantages.registry import register_advantage_estimator
from skyrl.algorithms.groups import group_stats

logger = logging.getLogger(__name__)


@register_advantage_estimator("rloo")
def rloo_advantages(
    token_level_rewards: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    index: Sequence[str] | np.ndarray,
    **_: Any,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """A_i = (s_i - mean)·n/(n-1) = s_i minus the mean of the group's other rows (arXiv:2402.14740, eq. 9).

    A group of one has no others: 0, with a warning. Returns equal advantages.
    """
    stats = group_stats(row_scores(token_level_rewards, response_mask), index)
    num_alone = int((stats.size == 1).sum())
    if num_alone:
        logger.warning("rloo: %d groups hold one rollout only; their advantage is 0", num_alone)
    advantage = stats.centred * stats.size / (stats.size - 1).clamp(min=1.0)
    advantages = spread_over_tokens(advantage, token_level_rewards, response_mask)
    return advantages, advantages
