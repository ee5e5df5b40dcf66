"""GDPO: rewards normalised apart."""

import pytest
import torch

from skyrl.algorithms.advantages import compute_advantages_and_returns
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.errors import ConfigError


def estimate(components, uids=None, weights=None, **options):
    rows = len(next(iter(components.values()))) if components else 2
    rewards = torch.zeros(rows, 2)
    advantages, _ = compute_advantages_and_returns(
        rewards, torch.ones_like(rewards), uids or ["g"] * rows, "gdpo", AlgorithmConfig(reward_weights=weights or {}),
        reward_components={name: torch.tensor(values) for name, values in components.items()}, **options,
    )  # fmt: skip
    return advantages[:, 0].tolist()


def test_it_has_the_spec_values():
    advantages = estimate({"a": [1.0, 0, 0, 0], "b": [10.0, 10, 0, 0]})
    assert advantages == pytest.approx([1.332110, 0.206079, -0.769094, -0.769094], abs=1e-6)


def test_the_size_of_a_reward_does_not_matter():
    small = estimate({"a": [1.0, 0, 0, 0], "b": [1.0, 1, 0, 0]})
    assert estimate({"a": [1.0, 0, 0, 0], "b": [1e4, 1e4, 0, 0]}) == pytest.approx(small, abs=1e-5)


def test_a_weight_of_zero_leaves_a_reward_out():
    """Left is a = [1, 0]: z = ±1/√2 over its std, and the batch has the same spread."""
    expected = [2**-0.5, -(2**-0.5)]
    assert estimate({"a": [1.0, 0.0], "b": [0.0, 5.0]}, weights={"b": 0.0}) == pytest.approx(expected, abs=1e-5)


def test_equal_rewards_and_groups_of_one_give_zero():
    assert estimate({"a": [3.0, 3.0, 7.0], "b": [1.0, 1.0, 2.0]}, uids=list("ggh")) == [0.0, 0.0, 0.0]


def test_no_components_name_what_an_environment_must_return():
    with pytest.raises(ConfigError, match=r'metadata\["rewards"\] = \{name: value\}'):
        estimate({})


def test_a_weight_for_an_unknown_reward_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"reward_weights\.styl=2 .*Did you mean 'style'\? Reported: answer, style"):
        estimate({"style": [1.0, 0.0], "answer": [0.0, 1.0]}, weights={"styl": 2})


def test_a_component_that_is_not_finite_is_named():
    with pytest.raises(ValueError, match=r"reward_components\['b'\] holds nan in row 1"):
        estimate({"a": [1.0, 0.0], "b": [0.0, float("nan")]})


def test_a_failed_row_may_hold_anything():
    valid = torch.tensor([True, True, False])
    with_failed = estimate({"a": [1.0, 0.0, float("nan")]}, valid_rows=valid)
    assert with_failed == pytest.approx([*estimate({"a": [1.0, 0.0]}), 0.0])
