"""Cross-entropy of the given tokens."""

import pytest
import torch
from hypothesis import given, settings

from skyrl.algorithms.policy_losses.cross_entropy import cross_entropy_loss
from skyrl.config.algorithm import AlgorithmConfig
from tests.algorithms.policy_losses.ragged import Batch, assert_same, per_token, ragged_batches


def test_it_is_the_sum_under_a_mask_that_may_weigh():
    log_probs = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    loss, metrics = cross_entropy_loss(log_probs, loss_mask=torch.tensor([[0.5, 0.0, 2.0]]))
    loss.backward()
    assert loss.item() == 0.5 * 1 + 2 * 3
    assert log_probs.grad.tolist() == [[-0.5, 0.0, -2.0]]
    assert metrics["clip_ratio"].item() == 0.0


def test_without_a_mask_every_token_counts():
    assert cross_entropy_loss(torch.tensor([[-1.0, -2.0]]))[0].item() == 3.0


@given(ragged_batches())
@settings(max_examples=30, deadline=None)
def test_it_agrees_with_a_loop_and_autograd(batch: Batch):
    loop = per_token(lambda token: -token.logp, lambda token: False)
    assert_same(cross_entropy_loss, batch, AlgorithmConfig(), loop, lambda logp, old, rollout, advantage: -logp)


def test_half_precision_is_summed_in_single():
    """In bfloat16, 256 + 1 is 256."""
    log_probs = torch.tensor([[-256.0, -1.0]], dtype=torch.bfloat16)
    loss, _ = cross_entropy_loss(log_probs)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(257.0)
