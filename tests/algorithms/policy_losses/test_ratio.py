"""Importance ratios."""

import math

import pytest
import torch

from skyrl.algorithms.policy_losses.ratio import at_least_float32, importance_ratio, log_ratio
from skyrl.algorithms.safe_exp import safe_exp


def test_the_ratio_is_that_of_the_probabilities():
    ratio = importance_ratio(torch.tensor([[0.6, 0.2]]).log(), torch.tensor([[0.4, 0.8]]).log(), None)
    assert ratio.tolist()[0] == pytest.approx([1.5, 0.25])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_masked_token_has_ratio_one_and_no_gradient(bad):
    log_probs = torch.tensor([[-1.0, bad]], requires_grad=True)
    ratio = importance_ratio(log_probs, torch.tensor([[-1.5, bad]]), torch.tensor([[1, 0]]))
    ratio.sum().backward()
    assert ratio.tolist()[0] == pytest.approx([math.exp(0.5), 1.0])
    assert log_probs.grad.tolist()[0] == pytest.approx([math.exp(0.5), 0.0])


def test_the_exponent_stays_within_20():
    assert safe_exp(torch.tensor([-30.0, 30.0], dtype=torch.float64)).tolist() == pytest.approx(
        [math.exp(-20), math.exp(20)]
    )
    assert safe_exp(torch.tensor([-math.inf, math.inf])).isfinite().all()


def test_half_precision_is_promoted_before_the_subtraction():
    """In bfloat16 the difference would round to 3.0."""
    log_probs, old = torch.tensor([[3.015625, 0.01]]).bfloat16().split(1, dim=1)
    difference = log_ratio(log_probs, old, None)
    assert difference.dtype == torch.float32
    assert difference.item() == pytest.approx(3.015625 - 0.010009765625, rel=1e-7)


def test_double_precision_is_kept():
    assert at_least_float32(torch.ones(1, dtype=torch.float64)).dtype == torch.float64
    assert at_least_float32(torch.ones(1, dtype=torch.float16)).dtype == torch.float32
