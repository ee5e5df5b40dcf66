"""LitePPO: centred in the group, scaled by the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from skyrl.algorithms.advantages.outcome import row_scores, row_std, shown_tokens, spread_over_tokens
from skyrl.algorithms.advantages.registry import register_advantage_estimator
from skyrl.algorithms.groups import group_index, group_stats


@register_advantage_estimator("liteppo", replaceable=True)
def liteppo_advantages(
    token_level_rewards: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    index: Sequence[str] | np.ndarray,
    *,
    epsilon: float = 1e-6,
    valid_rows: Bool[Tensor, " batch"] | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """A_i = (s_i - mean of the group) / (std of the batch + ε); std has ddof 1 (arXiv:2508.08221).

    The paper's choice goes with `loss_reduction=token_mean`. A group of one gets 0. Returns equal advantages.
    """
    shown = shown_tokens(response_mask, valid_rows)
    scores = row_scores(token_level_rewards, shown).double()
    stats = group_stats(scores, *group_index(index, valid_rows))
    advantage = stats.centred / (row_std(scores, valid_rows) + epsilon)
    advantages = spread_over_tokens(advantage, token_level_rewards, shown)
    return advantages, advantages
