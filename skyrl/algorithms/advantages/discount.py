"""Discounted sums over time for all rows at once."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_CHUNK = 64
"""Columns that one product sums; another product then sums over the chunks."""


def discounted_sums(
    values: Float[Tensor, "rows time"], factor: float | Float[Tensor, "rows time"]
) -> Float[Tensor, "rows time"]:
    """Return S_t = x_t + f_t·S_{t+1}, with S = 0 after the last column.

    Args:
        values: x, finite. Call it for as many rows as fit into the cache (`masked.row_blocks`).
        factor: f, one for all or one per element.
    """
    return _by_doubling(values, factor) if isinstance(factor, Tensor) else _by_chunks(values, factor)


def _by_chunks(values: Float[Tensor, "rows time"], factor: float) -> Float[Tensor, "rows time"]:
    """Sum inside chunks of columns by a product with a triangular matrix of powers, then add what follows a chunk."""
    rows, width = values.shape
    missing = -width % _CHUNK
    chunks = torch.nn.functional.pad(values, (missing, 0)).view(rows, -1, _CHUNK)
    inside = chunks @ _powers(factor, _CHUNK, values)
    count = chunks.shape[1]
    if count > 1:
        starts = inside[:, :, 0].contiguous()
        following = (starts @ _powers(factor**_CHUNK, count, values))[:, 1:, None]
        distance = torch.arange(_CHUNK, 0, -1, dtype=torch.float64, device=values.device)
        inside[:, :-1].addcmul_(following, (factor**distance).to(values.dtype))
    return inside.view(rows, -1)[:, missing:]


def _powers(factor: float, size: int, like: Tensor) -> Float[Tensor, "size size"]:
    """Return f^(s-t) at row s and column t ≤ s, zeros above."""
    steps = torch.arange(size, dtype=torch.float64, device=like.device)
    distance = steps.unsqueeze(1) - steps
    return (factor ** distance.clamp(min=0.0)).tril().to(like.dtype)


def _by_doubling(values: Float[Tensor, "rows time"], factor: Float[Tensor, "rows time"]) -> Float[Tensor, "rows time"]:
    """Double in each round how far a sum reaches: from x_t .. x_{t+n-1} to x_t .. x_{t+2n-1}."""
    width, reach = values.shape[1], 1
    while reach < width:
        near, far, end = slice(None, width - reach), slice(reach, None), slice(width - reach, None)
        grown = torch.empty_like(values)
        grown[:, end] = values[:, end]
        torch.addcmul(values[:, near], factor[:, near], values[:, far], out=grown[:, near])
        product = factor.new_zeros(factor.shape)
        torch.mul(factor[:, near], factor[:, far], out=product[:, near])
        values, factor, reach = grown, product, 2 * reach
    return values
