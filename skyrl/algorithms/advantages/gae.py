"""Generalised advantage estimation, for a run with a critic."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.advantages.registry import register_advantage_estimator
from skyrl.algorithms.masked import hide, masked_whiten


@register_advantage_estimator("gae", outcome=False, needs_values=True)
def gae_advantages(
    token_level_rewards: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    values: Float[Tensor, "batch response"],
    *,
    gamma: float = 1.0,
    lambd: float = 1.0,
    **_: Any,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """Discounted sums of temporal differences (arXiv:1506.02438, eq. 16), then whitened.

    δ_t = r_t + γ·V_{t+1} - V_t with V = 0 after the last token; A_t = δ_t + γλ·A_{t+1}; returns = A + V;
    advantages = whiten(A). Rows are right-aligned, so the padding on the left cannot reach a token.
    """
    # Time runs along the first dimension here: each step of the loop then reads contiguous memory.
    advantage = token_level_rewards.t().contiguous()
    by_time = values.t().contiguous()
    next_value, running = torch.zeros_like(by_time[0]), torch.zeros_like(by_time[0])
    for step in reversed(range(advantage.shape[0])):
        delta = advantage[step] + gamma * next_value - by_time[step]
        running = delta + gamma * lambd * running
        next_value = by_time[step]
        advantage[step] = running
    raw = hide(advantage.t(), response_mask)
    return masked_whiten(raw, response_mask), hide(raw + values, response_mask)
