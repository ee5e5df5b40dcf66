"""REINFORCE++: rewards to go, whitened over the batch."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.advantages.registry import register_advantage_estimator
from skyrl.algorithms.masked import hide, masked_whiten


@register_advantage_estimator("reinforce++", outcome=False)
def reinforce_plus_plus_advantages(
    token_level_rewards: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    *,
    gamma: float = 1.0,
    **_: Any,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """R_t = r_t + γ·μ_{t+1}·R_{t+1} with R = 0 after the last token; advantages = whiten(R) (arXiv:2501.03262).

    Returns equal R on response tokens.
    """
    returns = token_level_rewards.t().contiguous()
    mask = response_mask.t().bool().contiguous()
    running = torch.zeros_like(returns[0])
    for step in reversed(range(returns.shape[0])):
        running = torch.add(returns[step], running, alpha=gamma)
        returns[step] = running
        running = torch.where(mask[step], running, 0.0)
    to_go = hide(returns.t(), response_mask)
    return masked_whiten(to_go, response_mask), to_go
