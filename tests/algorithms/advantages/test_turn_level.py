"""Turn-level advantages."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.advantages import compute_advantages_and_returns
from skyrl.config.algorithm import AlgorithmConfig
from tests.algorithms.advantages.ragged import EPSILON, batches, mean_of, std_of


def estimate(rewards, loss_mask, uids=None, **options):
    rewards = torch.tensor(rewards)
    advantages, returns = compute_advantages_and_returns(
        rewards, torch.ones_like(rewards), uids or ["g"] * len(rewards), "turn_level", AlgorithmConfig(),
        loss_mask=torch.tensor(loss_mask), **options,
    )  # fmt: skip
    assert torch.equal(advantages, returns)
    return advantages


def test_it_has_the_spec_values():
    """Turn rewards [.2, 1], [0, .5], [.1]; the last row has one turn, before padding that no other row has."""
    advantages = estimate(
        [[0.0, 0.2, 0.0, 1.0], [0.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.1]],
        [[1, 1, 0, 1], [0, 1, 0, 1], [0, 0, 1, 1]],
        grpo_norm_by_std=False,
    )
    expected = [0.6, 0.6, 0, 0.25, 0, -0.1, 0, -0.25, 0, 0, -0.5, -0.5]
    assert advantages.flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_gamma_discounts_per_turn():
    """Turn 1 of the rows is worth 1 + 2/2 and 0; turn 2 is worth 2 and 0."""
    advantages = estimate(
        [[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0]], [[1, 1, 0, 1]] * 2, grpo_norm_by_std=False, gamma=0.5
    )
    assert advantages.tolist() == [[1.0, 1.0, 0.0, 1.0], [-1.0, -1.0, 0.0, -1.0]]


def test_the_reward_of_an_observation_belongs_to_the_turn_before_it():
    inside = estimate([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], [[1, 0, 1]] * 2)
    after = estimate([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]], [[1, 0, 1]] * 2)
    assert torch.equal(inside, after)
    assert inside[:, 2].tolist() == [0.0, 0.0]


def test_what_comes_before_the_first_turn_belongs_to_none():
    assert not estimate([[5.0, 0.0], [0.0, 0.0]], [[0, 1]] * 2).any()


def test_a_turn_that_one_row_has_gets_zero():
    advantages = estimate([[0.0, 0.0, 7.0], [0.0, 0.0, 1.0]], [[1, 0, 1], [0, 0, 1]], grpo_norm_by_std=False)
    assert advantages.tolist() == [[3.0, 0.0, 0.0], [0.0, 0.0, -3.0]]


def test_without_a_loss_mask_the_response_is_one_turn():
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    advantages, _ = compute_advantages_and_returns(
        rewards, torch.ones(2, 2), ["g", "g"], "turn_level", AlgorithmConfig(), grpo_norm_by_std=False
    )
    assert advantages.tolist() == [[0.5, 0.5], [-0.5, -0.5]]


def turns_of(mask):
    """Positions of each run of ones."""
    turns = []
    for t, shown in enumerate(mask):
        if shown and (t == 0 or not mask[t - 1]):
            turns.append([])
        if shown:
            turns[-1].append(t)
    return turns


def slow_turn_level(batch, norm, gamma):
    rows, width = batch.rewards.shape
    shown = (batch.loss_mask * batch.valid.unsqueeze(1)).tolist()
    rewards = (batch.rewards * batch.response_mask).tolist()
    to_go = []
    for i in range(rows):
        starts = [*(turn[0] for turn in turns_of(shown[i])), width]
        earned = [sum(rewards[i][a:b]) for a, b in pairwise(starts)]
        to_go.append([sum(gamma**j * r for j, r in enumerate(earned[k:])) for k in range(len(earned))])
    result = torch.zeros(rows, width, dtype=torch.float64)
    for i in range(rows):
        for k, turn in enumerate(turns_of(shown[i])):
            peers = [to_go[j][k] for j in range(rows) if batch.uids[j] == batch.uids[i] and len(to_go[j]) > k]
            result[i, turn] = (to_go[i][k] - mean_of(peers)) / (std_of(peers) + EPSILON if norm else 1.0)
    return result


@settings(max_examples=50, deadline=None)
@given(batches(), st.booleans(), st.floats(0, 1))
def test_it_agrees_with_a_loop(batch, norm, gamma):
    advantages, _ = batch.estimate("turn_level", grpo_norm_by_std=norm, gamma=gamma)
    assert torch.allclose(advantages, slow_turn_level(batch, norm, gamma), rtol=1e-5, atol=1e-6)
