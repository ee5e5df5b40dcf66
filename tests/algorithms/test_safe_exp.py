"""The exponential of bounded exponents."""

import math

import torch

from skyrl.algorithms.safe_exp import safe_exp


def test_exponents_are_held_within_20_and_have_no_gradient_beyond():
    exponents = torch.tensor(
        [-25.0, -20.0, 0.0, 20.0, 25.0, -math.inf, math.inf], dtype=torch.float64, requires_grad=True
    )
    values = safe_exp(exponents)
    values.sum().backward()
    low, high = math.exp(-20), math.exp(20)
    assert torch.allclose(values, torch.tensor([low, low, 1.0, high, high, low, high], dtype=torch.float64))
    assert torch.allclose(exponents.grad, torch.tensor([0.0, low, 1.0, high, 0.0, 0.0, 0.0], dtype=torch.float64))
