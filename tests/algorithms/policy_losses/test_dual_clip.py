"""PPO's clipped surrogate with a second bound for negative advantages."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.policy_losses.dual_clip import dual_clip_loss
from skyrl.config.algorithm import AlgorithmConfig
from tests.algorithms.policy_losses.ragged import Batch, assert_same, per_token, ragged_batches


def test_the_spec_values():
    config = AlgorithmConfig(eps_clip_low=0.2, eps_clip_high=0.2, clip_ratio_c=3.0)
    log_probs, advantages = torch.tensor([[1.5, 0.5, 4.0]]).log(), torch.tensor([[1.0, -1.0, -2.0]])
    for token, expected in enumerate([-1.2, 0.8, 6.0]):
        only = torch.nn.functional.one_hot(torch.tensor([token]), 3)
        loss, _ = dual_clip_loss(log_probs, torch.zeros(1, 3), advantages, config, only)
        assert loss.item() == pytest.approx(expected, rel=1e-6)
    _, metrics = dual_clip_loss(log_probs, torch.zeros(1, 3), advantages, config)
    assert metrics["clip_ratio"].item() == pytest.approx(2 / 3)


def test_beyond_the_second_bound_there_is_no_gradient():
    log_probs = torch.tensor([[math.log(4.0), math.log(2.0)]], requires_grad=True)
    loss, metrics = dual_clip_loss(
        log_probs, torch.zeros(1, 2), torch.tensor([[-2.0, -2.0]]), AlgorithmConfig(clip_ratio_c=3.0)
    )
    loss.backward()
    assert log_probs.grad.tolist()[0] == pytest.approx([0.0, 4.0])
    assert metrics["clip_ratio"].item() == 0.0


@given(ragged_batches(), st.floats(0.05, 0.5), st.floats(0.05, 0.9), st.floats(1.01, 3.0))
@settings(max_examples=40, deadline=None)
def test_it_agrees_with_a_loop_and_autograd(batch: Batch, low: float, high: float, bound: float):
    config = AlgorithmConfig(eps_clip_low=low, eps_clip_high=high, clip_ratio_c=bound)

    def token_loss(token):
        ratio = math.exp(token.logp - token.old)
        free, clipped = -ratio * token.advantage, -min(max(ratio, 1 - low), 1 + high) * token.advantage
        regular = max(free, clipped)
        return min(regular, -bound * token.advantage) if token.advantage < 0 else regular

    def is_clipped(token):
        ratio = math.exp(token.logp - token.old)
        return ratio > 1 + high if token.advantage > 0 else ratio < 1 - low

    def formula(logp, old, rollout, advantage):
        ratio = (logp - old).exp()
        regular = -torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        return torch.where(advantage < 0, torch.min(regular, -bound * advantage), regular)

    assert_same(dual_clip_loss, batch, config, per_token(token_loss, is_clipped), formula)
