"""Metrics of a training call: gathered on the device, reduced over micro-batches and ranks, read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from skyrl.algorithms.mean import Mean, MetricValue

NOT_SUMMED = frozenset({"mtp_loss", "draft_loss"})
Reduction = Literal["mean", "sum", "max", "min"]
AllReduce = Callable[[Tensor, Literal["sum", "max", "min"]], Tensor]


def reduction_of(name: str, sum_loss_metrics: bool = False) -> Reduction:
    """How a metric is reduced, by its name: ``_max``, ``_min``, losses (summed on request), else the mean."""
    if name.endswith("_max"):
        return "max"
    if name.endswith("_min"):
        return "min"
    last = name.rsplit("/", 1)[-1]
    if sum_loss_metrics and (last == "loss" or last.endswith("_loss")) and last not in NOT_SUMMED:
        return "sum"
    return "mean"


def reduce_metrics(metrics: Mapping[str, Sequence[float]], sum_loss_metrics: bool = False) -> dict[str, float]:
    """Reduce lists of numbers by the rule of `reduction_of`; other values are left out.

    Raises:
        ValueError: A list is empty; names the key.
    """
    reduced: dict[str, float] = {}
    for name, values in metrics.items():
        if not len(values):
            raise ValueError(f"no values for metric {name!r}")
        if not all(isinstance(value, int | float) for value in values):
            continue
        how = reduction_of(name, sum_loss_metrics)
        if how == "max":
            reduced[name] = max(values)
        elif how == "min":
            reduced[name] = min(values)
        else:
            reduced[name] = sum(values) if how == "sum" else sum(values) / len(values)
    return reduced


def finish_moments(metrics: Mapping[str, float]) -> dict[str, float]:
    """Replace every mean square `<x>_sq_mean` that stands beside `<x>_mean` by the standard deviation `<x>_std`."""
    done = dict(metrics)
    for name in metrics:
        stem = name.removesuffix("_sq_mean")
        if stem != name and f"{stem}_mean" in metrics:
            done[f"{stem}_std"] = max(0.0, done.pop(name) - metrics[f"{stem}_mean"] ** 2) ** 0.5
    return done


class MetricBuffer:
    """Collects metrics of micro-batches as tensors; nothing waits for the device before `result`.

    Means are weighted: a micro-batch without trained tokens has weight 0 and changes nothing.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._highest: dict[str, Tensor] = {}
        self._lowest: dict[str, Tensor] = {}

    def add_sum(self, name: str, value: Tensor) -> None:
        """Add to a total."""
        self._sums[name] = self._sums.get(name, 0) + value.detach().double()

    def add_mean(self, name: str, total: Tensor, weight: Tensor) -> None:
        """Add a weighted total and its weight to a mean."""
        self.add_sum(name, total)
        self._weights[name] = self._weights.get(name, 0) + weight.detach().double()

    def add_max(self, name: str, value: Tensor) -> None:
        """Keep the larger; -inf stands for no value."""
        value = value.detach().double()
        self._highest[name] = torch.maximum(self._highest[name], value) if name in self._highest else value

    def add_min(self, name: str, value: Tensor) -> None:
        """Keep the smaller; +inf stands for no value."""
        value = value.detach().double()
        self._lowest[name] = torch.minimum(self._lowest[name], value) if name in self._lowest else value

    def add_named(self, name: str, value: MetricValue, weight: Tensor) -> None:
        """Add what a loss reports of one micro-batch: a `Mean`, or a number by the rule of its name.

        ``weight`` is the micro-batch's number of trained tokens, the weight of a number that is a mean.
        """
        if isinstance(value, Mean):
            self.add_mean(name, value.total, value.count)
            return
        how = reduction_of(name, sum_loss_metrics=True)
        if how == "max":
            self.add_max(name, torch.where(weight > 0, value, -torch.inf))
        elif how == "min":
            self.add_min(name, torch.where(weight > 0, value, torch.inf))
        elif how == "sum":
            self.add_sum(name, value)
        else:
            self.add_mean(name, torch.where(weight > 0, value, 0.0) * weight, weight)

    def result(self, all_reduce: AllReduce) -> dict[str, float]:
        """Reduce over ranks, one collective for each kind, and read the numbers. Collective; equal keys on all ranks.

        A mean of weight 0 is 0; a maximum or minimum of nothing is left out.
        """
        totals = _reduce(
            self._sums | {f"{name}\0": weight for name, weight in self._weights.items()}, "sum", all_reduce
        )
        result = {
            name: total / max(totals[f"{name}\0"], 1e-12) if name in self._weights else total
            for name, total in totals.items()
            if not name.endswith("\0")
        }
        extremes = _reduce(self._highest, "max", all_reduce) | _reduce(self._lowest, "min", all_reduce)
        return result | {name: value for name, value in extremes.items() if abs(value) != float("inf")}


def _reduce(values: Mapping[str, Tensor], op: Literal["sum", "max", "min"], all_reduce: AllReduce) -> dict[str, float]:
    if not values:
        return {}
    names = sorted(values)
    packed = torch.stack([values[name].reshape(()) for name in names])
    return dict(zip(names, all_reduce(packed, op).tolist(), strict=True))
