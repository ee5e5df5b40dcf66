"""Importance ratios that neither overflow nor let a masked value through."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide


def importance_ratio(
    log_probs: Float[Tensor, "batch response"],
    other_log_probs: Float[Tensor, "batch response"],
    loss_mask: Shaped[Tensor, "batch response"] | None,
) -> Float[Tensor, "batch response"]:
    """Return exp(log_probs - other_log_probs), the exponent within ±20 and at least float32; 1 where the mask is 0."""
    exponent = hide(log_probs - other_log_probs, loss_mask)
    return exponent.to(torch.promote_types(exponent.dtype, torch.float32)).clamp(min=-20.0, max=20.0).exp()
