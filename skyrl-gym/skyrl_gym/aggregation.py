"""From the metrics of episodes to the metrics of a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def default_aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Average every numeric key over the episodes that report it.

    Booleans count as 0 and 1. Values that are not numbers, and NaN and infinities, are left out, so that one
    bad episode does not spoil the mean: `[{"a": 1}, {"a": 3, "b": 2}]` gives `{"a": 2.0, "b": 2.0}`.
    """
    values: dict[str, list[float]] = {}
    for episode in metrics:
        for key, value in episode.items():
            if isinstance(value, (bool, int, float)) and math.isfinite(value):
                values.setdefault(key, []).append(float(value))
    return {key: sum(numbers) / len(numbers) for key, numbers in values.items()}
