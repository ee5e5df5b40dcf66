"""The policy gradient with a free importance ratio."""

import math

import pytest
import torch
from hypothesis import given, settings

from skyrl.algorithms.policy_losses.importance_sampling import importance_sampling_loss
from skyrl.config.algorithm import AlgorithmConfig
from tests.algorithms.policy_losses.ragged import Batch, assert_same, ragged_batches


def test_it_is_the_ratio_times_the_advantage():
    log_probs = torch.tensor([[4.0, 0.5]]).log().requires_grad_()
    loss, metrics = importance_sampling_loss(log_probs, torch.zeros(1, 2), torch.tensor([[1.0, -2.0]]))
    loss.backward()
    assert loss.item() == pytest.approx(-4.0 + 1.0)
    assert log_probs.grad.tolist()[0] == pytest.approx([-4.0, 1.0])
    assert metrics["importance_ratio"].item() == pytest.approx(2.25)


@given(ragged_batches())
@settings(max_examples=30, deadline=None)
def test_it_agrees_with_a_loop_and_autograd(batch: Batch):
    def loop(batch: Batch):
        ratios = [math.exp(token.logp - token.old) for token in batch.tokens]
        total = sum(-r * token.advantage * token.weight for r, token in zip(ratios, batch.tokens, strict=True))
        return total, {"importance_ratio": sum(ratios) / max(1, len(ratios))}

    def formula(logp, old, rollout, advantage):
        return -(logp.exp() / old.exp()) * advantage

    assert_same(importance_sampling_loss, batch, AlgorithmConfig(), loop, formula)
