"""Sums, means and whitening over masked tensors; what a mask hides never reaches a result, NaN included."""

from __future__ import annotations

import logging

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

logger = logging.getLogger(__name__)


def hide(values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"] | None) -> Float[Tensor, "*shape"]:
    """Return `values` with exact zeros where the mask is zero."""
    return values if mask is None else torch.where(mask.bool(), values, 0.0)


def weighted_sum(
    values: Float[Tensor, "*shape"],
    mask: Shaped[Tensor, "*shape"] | None,
    weights: Float[Tensor, "*shape"] | None = None,
) -> Float[Tensor, ""]:
    """Return Σ w·m·x, where a missing mask or missing weights count as ones.

    The mask may carry factors (a scaled loss mask). Where mask or weight is zero, value and gradient are exactly
    zero, whatever stands there.
    """
    if weights is None and (mask is None or mask.dtype == torch.bool):
        return hide(values, mask).sum()
    factors = weights if mask is None else mask if weights is None else weights * mask
    assert factors is not None
    return (torch.where(factors != 0, values, 0.0) * factors).sum()


def masked_mean(
    values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"] | None, dim: int | None = None
) -> Tensor:
    """Return Σ x·m / max(1, Σ m), over everything or over one dimension.

    Args:
        values: Any shape.
        mask: Zeros hide, the values of a floating-point mask weigh. None gives the plain mean.
        dim: The dimension that disappears; None for all.
    """
    if mask is None:
        return values.mean() if dim is None else values.mean(dim)
    shown = hide(values, mask)
    if mask.dtype.is_floating_point:  # other masks are 0 and 1 already
        shown = shown * mask
    if dim is None:
        return shown.sum() / mask.sum().clamp(min=1)
    return shown.sum(dim) / mask.sum(dim).clamp(min=1)


def masked_var(
    values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"], unbiased: bool = True
) -> Float[Tensor, ""]:
    """Return the second moment about the masked mean, times N/(N-1) when unbiased; 0 for fewer than two values."""
    centred = hide(values - masked_mean(values, mask), mask)
    variance = masked_mean(centred.square(), mask)
    if not unbiased:
        return variance
    count = mask.to(values.dtype).sum()
    return torch.where(count > 1, variance * count / (count - 1).clamp(min=1.0), 0.0)


def masked_whiten(
    values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"], shift_mean: bool = True
) -> Float[Tensor, "*shape"]:
    """Bring what the mask shows to mean 0 (unless `shift_mean` is false) and variance 1: (x - mean)·rsqrt(var + 1e-8).

    Returns:
        The whitened values, and zeros where the mask is zero. Fewer than two values have no variance: all
        zeros then, with a warning.
    """
    shown: Bool[Tensor, "*shape"] = mask.bool()
    count = int(torch.count_nonzero(shown))
    if count < 2:
        logger.warning("Whitening needs at least two unmasked values; the result is zero everywhere")
        return torch.zeros_like(values)
    mean = hide(values, shown).sum() / count
    centred = hide(values - mean, shown)
    whitened = centred * torch.rsqrt(centred.square().sum() / (count - 1) + 1e-8)
    return whitened if shift_mean else hide(whitened + mean, shown)
