"""OPO: a rollout against the length-weighted mean of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from skyrl.algorithms.advantages.outcome import row_counts, row_scores, shown_tokens, spread_over_tokens
from skyrl.algorithms.advantages.registry import register_advantage_estimator
from skyrl.algorithms.groups import group_index, group_stats, group_sum


@register_advantage_estimator("opo", replaceable=True)
def opo_advantages(
    token_level_rewards: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    index: Sequence[str] | np.ndarray,
    *,
    loss_mask: Shaped[Tensor, "batch response"] | None = None,
    valid_rows: Bool[Tensor, " batch"] | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """A_i = s_i - Σ_j l_j·s_j / Σ_j l_j over the group, with l the trained tokens of a row (arXiv:2505.23585).

    The baseline of least gradient variance when the squared norm of a rollout's gradient grows with its length.
    Without `loss_mask` every response token counts as trained. A group without trained tokens takes the plain
    mean; a group of one gets 0. Returns equal advantages.
    """
    shown = shown_tokens(response_mask, valid_rows)
    groups, num_groups = group_index(index, valid_rows)
    stats = group_stats(row_scores(token_level_rewards, shown), groups, num_groups)
    length = row_counts(shown if loss_mask is None else loss_mask).double()
    weighted = group_sum(length * stats.centred, groups, num_groups)
    offset = weighted / group_sum(length, groups, num_groups).clamp(min=1.0)
    advantages = spread_over_tokens(stats.centred - offset[groups], token_level_rewards, shown)
    return advantages, advantages
