"""A metric that stays exact however a batch is cut."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean as its two sums: over micro-batches and ranks it is Σ total / Σ count.

    A loss returns it for a metric whose weight is not the number of trained tokens, such as a share of rows.

    Example:
        >>> Mean(torch.tensor(3.0), torch.tensor(4.0)).item()
        0.75
    """

    total: Float[Tensor, ""]
    """Sum of the values."""
    count: Float[Tensor, ""]
    """How many there are; 0 changes no mean."""

    @classmethod
    def over(cls, values: Shaped[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"]) -> Mean:
        """The mean of the values where the mask is not zero."""
        shown = mask != 0
        return cls(hide(values.detach().float(), shown).sum(), shown.sum().float())

    def item(self) -> float:
        """Return the number; 0.0 for a mean over nothing."""
        return (self.total / self.count.clamp(min=1e-12)).item() if self.count.item() else 0.0


MetricValue = Tensor | Mean
