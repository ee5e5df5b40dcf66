"""GPG: a rollout against the mean of its group, scaled up for the groups that teach nothing."""

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
from skyrl.algorithms.masked import hide


@register_advantage_estimator("gpg", replaceable=True)
def gpg_advantages(
    token_level_rewards: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    index: Sequence[str] | np.ndarray,
    *,
    valid_rows: Bool[Tensor, " batch"] | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """A_i = α·(s_i - mean) within the group, α = groups / groups whose scores differ (arXiv:2504.02546).

    No group with a spread: all 0. A group of one has no spread. Returns equal advantages.
    """
    shown = shown_tokens(response_mask, valid_rows)
    stats = group_stats(row_scores(token_level_rewards, shown), *group_index(index, valid_rows))
    share = hide(1.0 / stats.size, valid_rows)  # adds up to 1 in each group
    num_groups, num_spread = share.sum(), torch.where(stats.std > 0, share, 0.0).sum()
    scale = num_groups / torch.where(num_spread > 0, num_spread, 1.0)
    advantages = spread_over_tokens(scale * stats.centred, token_level_rewards, shown)
    return advantages, advantages
