"""Generalised advantage estimation, for a run with a critic."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from skyrl.algorithms.advantages.discount import discounted_sums
from skyrl.algorithms.advantages.outcome import shown_tokens
from skyrl.algorithms.advantages.registry import register_advantage_estimator
from skyrl.algorithms.masked import hide_in_place, masked_whiten, row_blocks


@register_advantage_estimator("gae", outcome=False, needs_values=True)
def gae_advantages(
    token_level_rewards: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    values: Float[Tensor, "batch response"],
    *,
    gamma: float = 1.0,
    lambd: float = 1.0,
    valid_rows: Bool[Tensor, " batch"] | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """Discounted sums of temporal differences (arXiv:1506.02438, eq. 16), then whitened.

    δ_t = r_t + γ·V_{t+1} - V_t with V = 0 after the last token; A_t = δ_t + γλ·A_{t+1}; returns = A + V;
    advantages = whiten(A). The mask has no part in the recursion, except that NaN and infinities which it hides
    count as 0.
    """
    shown = shown_tokens(response_mask, valid_rows)
    advantages, returns = torch.empty_like(token_level_rewards), torch.empty_like(token_level_rewards)
    for rows in row_blocks(token_level_rewards):
        reward, value = (_without_hidden_nan(x[rows], shown[rows]) for x in (token_level_rewards, values))
        delta = reward - value
        delta[:, :-1].add_(value[:, 1:], alpha=gamma)
        advantage = discounted_sums(delta, float(gamma * lambd))
        advantages[rows] = advantage
        hide_in_place(torch.add(advantage, value, out=returns[rows]), shown[rows])
    return masked_whiten(advantages, shown, out=advantages), returns


def _without_hidden_nan(values: Float[Tensor, "*shape"], shown: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    if bool(values.sum().isfinite()):
        return values
    return torch.where(shown, values, torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0))
