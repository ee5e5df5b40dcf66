"""REINFORCE++: rewards to go, whitened over the batch."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from skyrl.algorithms.advantages.discount import discounted_sums
from skyrl.algorithms.advantages.outcome import shown_tokens
from skyrl.algorithms.advantages.registry import register_advantage_estimator
from skyrl.algorithms.masked import hide, hide_in_place, masked_whiten, row_blocks


@register_advantage_estimator("reinforce++", outcome=False)
def reinforce_plus_plus_advantages(
    token_level_rewards: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    *,
    gamma: float = 1.0,
    valid_rows: Bool[Tensor, " batch"] | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """R_t = r_t + γ·μ_{t+1}·R_{t+1} with R = 0 after the last token; advantages = whiten(R) (arXiv:2501.03262).

    Returns equal R on response tokens.
    """
    shown = shown_tokens(response_mask, valid_rows)
    returns = torch.empty_like(token_level_rewards)
    for rows in row_blocks(token_level_rewards):
        rewards = hide(token_level_rewards[rows], shown[rows])
        to_go = discounted_sums(rewards, _discounts(shown[rows], gamma, returns))
        hide_in_place(returns[rows].copy_(to_go), shown[rows])
    return masked_whiten(returns, shown), returns


def _discounts(shown: Bool[Tensor, "rows response"], gamma: float, like: Tensor) -> float | Tensor:
    """Return γ·μ_{t+1}; plain γ where each response token is followed by another one or by the end of its row."""
    if not bool((shown[:, 1:] < shown[:, :-1]).any()):
        return float(gamma)
    factor = like.new_zeros(shown.shape)
    factor[:, :-1] = gamma * shown[:, 1:]
    return factor
