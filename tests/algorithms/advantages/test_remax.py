"""ReMax: the greedy rollout is the baseline."""

import pytest
import torch

from skyrl.algorithms.advantages import AdvantageEstimatorRegistry, compute_advantages_and_returns
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.errors import ConfigError


def estimate(scores, baseline, **options):
    rewards = torch.tensor(scores).unsqueeze(1)
    advantages, _ = compute_advantages_and_returns(
        rewards, torch.ones_like(rewards), ["g"] * len(scores), "remax", AlgorithmConfig(),
        baseline_scores=None if baseline is None else torch.tensor(baseline), **options,
    )  # fmt: skip
    return advantages.squeeze(1).tolist()


def test_it_has_the_spec_values():
    assert estimate([1.0, 0.0], [1.0, 1.0]) == [0.0, -1.0]


def test_it_asks_for_a_baseline():
    assert AdvantageEstimatorRegistry.traits("remax").needs_baseline
    with pytest.raises(ConfigError, match="needs baseline_scores"):
        estimate([1.0, 0.0], None)


def test_a_failed_greedy_rollout_gives_zero_and_one_warning(caplog):
    assert estimate([1.0, 2.0, 3.0], [0.5, float("nan"), float("nan")]) == [0.5, 0.0, 0.0]
    assert [record.message for record in caplog.records] == [
        "remax: the greedy rollout of 2 rows failed; their advantage is 0"
    ]


def test_a_failed_row_is_not_counted_among_them(caplog):
    assert estimate([1.0, 2.0], [0.5, float("nan")], valid_rows=torch.tensor([True, False])) == [0.5, 0.0]
    assert not caplog.records


def test_an_infinite_baseline_is_refused():
    with pytest.raises(ValueError, match="baseline_scores holds inf in row 1"):
        estimate([1.0, 2.0], [0.0, float("inf")])
