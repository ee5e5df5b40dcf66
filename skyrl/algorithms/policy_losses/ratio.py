"""Importance ratios that neither overflow nor let a masked value through."""

from __future__ import annotations

from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide


def importance_ratio(
    log_probs: Float[Tensor, "batch response"],
    other_log_probs: Float[Tensor, "batch response"],
    loss_mask: Shaped[Tensor, "batch response"] | None,
) -> Float[Tensor, "batch response"]:
    """Return exp(log_probs - other_log_probs), the exponent in float32 and within ±20; 1 where the mask is 0."""
    return hide(log_probs - other_log_probs, loss_mask).float().clamp(min=-20.0, max=20.0).exp()
