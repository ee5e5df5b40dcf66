from __future__ import annotations

import pytest
import torch
from torch import Tensor, tensor

from skyrl.backends.skyrl_train.workers.metrics import MetricBuffer, reduce_metrics


def alone(values: Tensor, op: str) -> Tensor:
    del op
    return values


def test_names_choose_the_reduction() -> None:
    metrics = {"a_max": [1, 3], "a_min": [1, 3], "loss": [1, 3], "x/b_loss": [1, 3], "mtp_loss": [1, 3], "c": [1, 3]}
    assert reduce_metrics(metrics) == {"a_max": 3, "a_min": 1, "loss": 2, "x/b_loss": 2, "mtp_loss": 2, "c": 2}
    summed = reduce_metrics(metrics, sum_loss_metrics=True)
    assert (summed["loss"], summed["x/b_loss"], summed["mtp_loss"], summed["c"]) == (4, 4, 2, 2)


def test_an_empty_metric_is_named_and_words_are_skipped() -> None:
    with pytest.raises(ValueError, match="'empty'"):
        reduce_metrics({"empty": []})
    assert reduce_metrics({"word": ["a"], "n": [1.0]}) == {"n": 1.0}


def test_means_weigh_micro_batches_and_empty_ones_change_nothing() -> None:
    buffer = MetricBuffer()
    buffer.add_mean("m", tensor(2.0), tensor(1))  # one token of value 2
    buffer.add_mean("m", tensor(12.0), tensor(3))  # three of value 4
    buffer.add_mean("m", tensor(0.0), tensor(0))
    buffer.add_named("clip_ratio", tensor(0.5), tensor(1))
    buffer.add_named("clip_ratio", tensor(float("nan")), tensor(0))
    assert buffer.result(alone) == {"m": 3.5, "clip_ratio": 0.5}


def test_extremes_and_sums() -> None:
    buffer = MetricBuffer()
    for value, weight in ((1.0, 1), (5.0, 1), (99.0, 0)):
        buffer.add_named("x_max", tensor(value), tensor(weight))
        buffer.add_named("x_min", tensor(value), tensor(weight))
        buffer.add_named("some_loss", tensor(value), tensor(weight))
    buffer.add_max("none_max", tensor(-torch.inf))
    assert buffer.result(alone) == {"x_max": 5.0, "x_min": 1.0, "some_loss": 105.0}


def test_ranks_are_reduced_in_one_collective_for_each_kind() -> None:
    calls = []

    def twice(values: Tensor, op: str) -> Tensor:
        calls.append(op)
        return values * 2 if op == "sum" else values

    buffer = MetricBuffer()
    for name in ("a", "b", "c"):
        buffer.add_mean(name, tensor(1.0), tensor(2))
        buffer.add_sum(f"{name}_sum", tensor(1.0))
        buffer.add_max(f"{name}_max", tensor(1.0))
    result = buffer.result(twice)
    assert sorted(calls) == ["max", "sum"]
    assert (result["a"], result["a_sum"], result["a_max"]) == (0.5, 2.0, 1.0)
