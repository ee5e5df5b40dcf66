"""Importance ratios that neither overflow nor let a masked value through."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide
from skyrl.algorithms.safe_exp import safe_exp


def at_least_float32(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the values in float32, or as they are where they are more precise."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def mean_over_trained(
    values: Float[Tensor, "batch response"], loss_mask: Shaped[Tensor, "batch response"] | None
) -> Float[Tensor, ""]:
    """Return what `masked_mean` does, in one product, for values without gradient that are finite everywhere."""
    if loss_mask is None:
        return values.mean()
    weights = loss_mask.to(values.dtype).flatten()
    return values.detach().flatten().dot(weights) / weights.sum().clamp(min=1)


def log_ratio(
    log_probs: Float[Tensor, "batch response"],
    other_log_probs: Float[Tensor, "batch response"],
    loss_mask: Shaped[Tensor, "batch response"] | None,
) -> Float[Tensor, "batch response"]:
    """Return log_probs - other_log_probs in nats, at least in float32; 0 where the mask is 0."""
    return hide(at_least_float32(log_probs) - other_log_probs, loss_mask)


def importance_ratio(
    log_probs: Float[Tensor, "batch response"],
    other_log_probs: Float[Tensor, "batch response"],
    loss_mask: Shaped[Tensor, "batch response"] | None,
) -> Float[Tensor, "batch response"]:
    """Return exp(log_probs - other_log_probs), the exponent within ±20 and at least float32; 1 where the mask is 0."""
    return safe_exp(log_ratio(log_probs, other_log_probs, loss_mask))
