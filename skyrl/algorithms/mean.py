"""A metric that stays exact however a batch is cut."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide


class Mean(NamedTuple):
    """A mean as its two sums: over micro-batches and ranks it is Σ total / Σ count.

    A loss returns it for a metric whose weight is not the number of trained tokens, such as a share of rows.
    """

    total: Float[Tensor, ""]
    count: Float[Tensor, ""]

    @classmethod
    def over(cls, values: Shaped[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"]) -> Mean:
        """The mean of the values where the mask is not zero."""
        shown = mask != 0
        return cls(hide(values.detach().float(), shown).sum(), shown.sum().float())

    def item(self) -> float:
        """Return the number; 0.0 for a mean over nothing."""
        return (self.total / self.count.clamp(min=1e-12)).item() if self.count.item() else 0.0


MetricValue = Tensor | Mean
