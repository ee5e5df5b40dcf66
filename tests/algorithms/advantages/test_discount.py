"""Discounted sums over time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.advantages.discount import discounted_sums


def slow_sums(values, factors):
    """Right to left, one element after another."""
    result = [row[:] for row in values]
    for row, factor in zip(result, factors, strict=True):
        for t in reversed(range(len(row) - 1)):
            row[t] += factor[t] * row[t + 1]
    return result


@pytest.mark.parametrize("width", [1, 2, 3, 7, 64, 65, 130, 4097])
@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, -0.5])
def test_one_factor_for_all(width, factor):
    values = torch.arange(2.0 * width, dtype=torch.float64).view(2, width) % 7
    expected = slow_sums(values.tolist(), [[factor] * width] * 2)
    assert torch.allclose(discounted_sums(values, factor), torch.tensor(expected, dtype=torch.float64))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.integers(0, 2**31))
def test_a_factor_for_each_element(rows, width, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    factors = torch.rand(rows, width, generator=generator, dtype=torch.float64).round(decimals=1)
    before = values.clone(), factors.clone()
    expected = torch.tensor(slow_sums(values.tolist(), factors.tolist()), dtype=torch.float64)
    assert torch.allclose(discounted_sums(values, factors), expected)
    assert torch.equal(values, before[0])
    assert torch.equal(factors, before[1])
