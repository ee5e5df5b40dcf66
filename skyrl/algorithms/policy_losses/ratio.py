"""Importance ratios that neither overflow nor let a masked value through."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide


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


def safe_exp(exponent: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return exp(x), the exponent held within ±20, where float32 is finite and above zero."""
    result: Tensor = _SafeExp.apply(exponent)  # type: ignore[no-untyped-call]
    return result


class _SafeExp(torch.autograd.Function):
    """The two operations as one, with a backward pass of two products."""

    @staticmethod
    def forward(ctx: Any, exponent: Tensor) -> Tensor:
        result = exponent.clamp(min=-20.0, max=20.0).exp_()
        # Comparisons in place give 0 and 1 as numbers: several times faster on a CPU than flags.
        ctx.save_for_backward(result, exponent.abs().le_(20.0))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        result, inside = ctx.saved_tensors
        by_exponent: Tensor = (grads[0] * result).mul_(inside)
        return by_exponent


def importance_ratio(
    log_probs: Float[Tensor, "batch response"],
    other_log_probs: Float[Tensor, "batch response"],
    loss_mask: Shaped[Tensor, "batch response"] | None,
) -> Float[Tensor, "batch response"]:
    """Return exp(log_probs - other_log_probs), the exponent within ±20 and at least float32; 1 where the mask is 0."""
    return safe_exp(log_ratio(log_probs, other_log_probs, loss_mask))
