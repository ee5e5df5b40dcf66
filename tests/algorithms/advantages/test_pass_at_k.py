"""pass@k advantages."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.advantages import compute_advantages_and_returns
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.errors import ConfigError
from tests.algorithms.advantages.ragged import slow_pass_at_k


def estimate(scores, k, uids=None):
    rewards = torch.tensor(scores, dtype=torch.float64).unsqueeze(1)
    advantages, _ = compute_advantages_and_returns(
        rewards, torch.ones_like(rewards), uids or ["g"] * len(scores), "pass_at_k", AlgorithmConfig(pass_at_k=k)
    )
    return advantages.squeeze(1).tolist()


def test_it_has_the_spec_values():
    assert estimate([1, 0, 0, 0], 2) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert estimate([1, 1, 0, 0, 0, 0], 3) == pytest.approx([0.5, 0.5, -0.25, -0.25, -0.25, -0.25])


def test_with_k_1_scores_are_standardised():
    """One of four passes: mean 1/4, σ = √3/4."""
    assert estimate([1, 0, 0, 0], 1) == pytest.approx([3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)])


@pytest.mark.parametrize("scores", [[1, 1, 1], [0, 0, 0], [-1, -2, 0], [1, 1, 0]])
def test_without_a_spread_of_subsets_it_is_exactly_zero(scores):
    """All pass, none passes, or (last) each pair holds one that passes."""
    assert estimate(scores, 2) == [0.0, 0.0, 0.0]


def test_a_group_smaller_than_k_gets_zero():
    assert estimate([1, 0, 1, 0, 0], 3, uids=list("aabbb")) == pytest.approx([0, 0, 0, 0, 0])


def test_thousands_of_rows_do_not_overflow():
    """One of N passes. A share k/N of the subsets holds it, so its advantage is √((1-p)/p) with p = k/N."""
    rows, k = 4000, 100
    p = k / rows
    advantages = estimate([1] + [0] * (rows - 1), k)
    assert advantages[0] == pytest.approx(((1 - p) / p) ** 0.5, rel=1e-6)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-6)


def test_a_k_below_1_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.algorithm\.pass_at_k=0 must be at least 1"):
        estimate([1, 0], 0)


def test_an_infinite_reward_is_no_success():
    with pytest.raises(ValueError, match="token_level_rewards holds inf in row 1"):
        estimate([0, float("inf")], 2)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(1, 10))
def test_it_is_the_mean_over_all_subsets_that_hold_the_row(passed, k):
    expected = [slow_pass_at_k(passed, row, k) for row in range(len(passed))]
    assert estimate([float(p) for p in passed], k) == pytest.approx(expected, abs=1e-9)
