"""Discounted sums over time for all rows at once."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def discounted_sums(
    values: Float[Tensor, "rows time"], factor: float | Float[Tensor, "rows time"]
) -> Float[Tensor, "rows time"]:
    """Return S_t = x_t + f_t·S_{t+1}, with S = 0 after the last column.

    Each round doubles how far a sum reaches: from x_t .. x_{t+n-1} to x_t .. x_{t+2n-1}. That is log2(time) rounds
    over whole rows, and errors grow with their number, not with the length. Nothing ever moves to the right, so what
    stands on the left of a column cannot reach it.

    Args:
        values: x. Call it for as many rows as fit into the cache (`row_blocks`).
        factor: f, one for all or one per element.
    """
    width, reach = values.shape[1], 1
    while reach < width and not (isinstance(factor, float) and factor == 0.0):
        near, far, end = slice(None, width - reach), slice(reach, None), slice(width - reach, None)
        grown = torch.empty_like(values)
        grown[:, end] = values[:, end]
        if isinstance(factor, Tensor):
            torch.addcmul(values[:, near], factor[:, near], values[:, far], out=grown[:, near])
            product = factor.new_zeros(factor.shape)
            torch.mul(factor[:, near], factor[:, far], out=product[:, near])
            factor = product
        else:
            torch.add(values[:, near], values[:, far], alpha=factor, out=grown[:, near])
            factor *= factor
        values, reach = grown, 2 * reach
    return values
