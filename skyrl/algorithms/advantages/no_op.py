"""Token rewards as advantages: for runs whose rewards are the learning signal already, such as distillation."""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from skyrl.algorithms.advantages.outcome import shown_tokens
from skyrl.algorithms.advantages.registry import register_advantage_estimator
from skyrl.algorithms.masked import hide


@register_advantage_estimator("no_op", outcome=False, replaceable=True)
def no_op_advantages(
    token_level_rewards: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    *,
    valid_rows: Bool[Tensor, " batch"] | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """A_t = r_t on response tokens. Returns equal advantages."""
    advantages = hide(token_level_rewards, shown_tokens(response_mask, valid_rows))
    return advantages, advantages
