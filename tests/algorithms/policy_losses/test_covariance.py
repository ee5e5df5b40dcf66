"""The covariance of a token's advantage and log-prob."""

import pytest
import torch

from skyrl.algorithms.policy_losses.covariance import token_covariance


def test_both_are_centred_over_trained_tokens():
    """Means 2 and -2, so (1-2)(-1+2), (2-2)(-2+2), (3-2)(-3+2)."""
    log_probs = torch.tensor([[0.0, -1.0], [-2.0, -3.0]], requires_grad=True)
    trained = torch.tensor([[False, True], [True, True]])
    covariance = token_covariance(log_probs, torch.tensor([[0.0, 1.0], [2.0, 3.0]]), trained)
    assert covariance[trained].tolist() == pytest.approx([-1.0, 0.0, -1.0])
    assert not covariance.requires_grad


def test_nothing_trained_is_finite():
    assert token_covariance(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2).bool()).isfinite().all()
