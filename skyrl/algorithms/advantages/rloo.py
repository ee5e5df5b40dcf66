"""RLOO: a rollout against the mean of the others of its group."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from skyrl.algorithms.advantages.outcome import row_scores, shown_tokens, spread_over_tokens
from skyrl.algorithms.advantages.registry import register_advantage_estimator
from skyrl.algorithms.groups import group_index, group_stats
from skyrl.algorithms.masked import hide

logger = logging.getLogger(__name__)


@register_advantage_estimator("rloo")
def rloo_advantages(
    token_level_rewards: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    index: Sequence[str] | np.ndarray,
    *,
    valid_rows: Bool[Tensor, " batch"] | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """A_i = (s_i - mean)·n/(n-1) = s_i minus the mean of the group's other rows (arXiv:2402.14740, eq. 9).

    A group of one has no others: 0, with a warning. Returns equal advantages.
    """
    shown = shown_tokens(response_mask, valid_rows)
    stats = group_stats(row_scores(token_level_rewards, shown), *group_index(index, valid_rows))
    num_alone = int(hide((stats.size == 1).float(), valid_rows).sum())
    if num_alone:
        logger.warning("rloo: %d groups hold one rollout only; their advantage is 0", num_alone)
    advantage = stats.centred * stats.size / (stats.size - 1).clamp(min=1.0)
    advantages = spread_over_tokens(advantage, token_level_rewards, shown)
    return advantages, advantages
