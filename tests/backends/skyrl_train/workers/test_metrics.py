from __future__ import annotations

import pytest
import torch
from torch import Tensor, tensor

from skyrl.algorithms.mean import Mean
from skyrl.backends.skyrl_train.workers.metrics import MetricBuffer, finish_moments, reduce_metrics


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


def test_a_mean_of_a_loss_weighs_by_its_own_count_whatever_its_name() -> None:
    """Rows: 1 of 1 and 1 of 3 dropped make 2 of 4; the trained tokens 7 and 0 do not matter."""
    buffer = MetricBuffer()
    for name in ("dropped_ratio", "cispo/ratio_max", "mean_loss"):
        buffer.add_named(name, Mean(tensor(1.0), tensor(1.0)), tensor(7))
        buffer.add_named(name, Mean(tensor(1.0), tensor(3.0)), tensor(0))
    assert buffer.result(alone) == {"dropped_ratio": 0.5, "cispo/ratio_max": 0.5, "mean_loss": 0.5}


def test_an_extreme_in_a_group_of_metrics_is_an_extreme() -> None:
    buffer = MetricBuffer()
    for value in (2.0, 5.0, 3.0):
        buffer.add_named("loss_metrics/cispo/ratio_max", tensor(value), tensor(1))
        buffer.add_named("loss_metrics/cispo/ratio_min", tensor(value), tensor(1))
    assert buffer.result(alone) == {"loss_metrics/cispo/ratio_max": 5.0, "loss_metrics/cispo/ratio_min": 2.0}


@pytest.mark.parametrize(("square", "deviation"), [(0.13, 0.2), (0.0899999, 0.0)])
def test_a_mean_and_a_mean_square_give_a_deviation(square: float, deviation: float) -> None:
    metrics = {"x_mean": 0.3, "x_sq_mean": square, "alone_sq_mean": 2.0, "other": 1.0}
    assert finish_moments(metrics) == {
        "x_mean": 0.3,
        "x_std": pytest.approx(deviation),
        "alone_sq_mean": 2.0,
        "other": 1.0,
    }


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
