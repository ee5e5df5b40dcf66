"""Sums, means and whitening under a mask."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms import masked
from skyrl.algorithms.masked import (
    hide,
    masked_max,
    masked_mean,
    masked_min,
    masked_moments,
    masked_var,
    masked_whiten,
    row_blocks,
    weighted_sum,
)

NAN, INF = float("nan"), float("inf")


def test_mean_counts_only_what_the_mask_shows():
    values = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert masked_mean(values, mask).item() == 2.0
    assert masked_mean(values, mask, dim=-1).tolist() == [1.5, 3.0]


def test_mean_without_a_mask_is_plain():
    assert masked_mean(torch.tensor([1.0, 2.0, 6.0]), None).item() == 3.0


def test_mean_of_nothing_is_zero():
    assert masked_mean(torch.tensor([NAN, INF]), torch.zeros(2)).item() == 0.0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_what_the_mask_hides_reaches_neither_value_nor_gradient(bad, mask_dtype):
    values = torch.tensor([1.0, bad, 3.0], requires_grad=True)
    mask = torch.tensor([1, 0, 1]).to(mask_dtype)
    total = weighted_sum(hide(values, mask), mask, torch.tensor([0.5, 1.0, 0.25]))
    total.backward()
    assert total.item() == pytest.approx(0.5 + 0.75)
    assert values.grad.tolist() == [0.5, 0.0, 0.25]
    assert masked_mean(values, mask).item() == 2.0
    assert masked_whiten(values.detach(), mask).isfinite().all()


def test_a_mask_with_factors_weighs_the_sum():
    total = weighted_sum(torch.tensor([2.0, 3.0, 5.0]), torch.tensor([0.5, 0.0, 2.0]))
    assert total.item() == 11.0


def test_whitening_has_the_spec_values():
    whitened = masked_whiten(torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3))
    assert whitened.tolist()[0] == pytest.approx([-0.872872, -0.218218, 1.091089], abs=1e-6)


def test_whitening_can_keep_the_mean():
    values = torch.tensor([[1.0, 2.0, 4.0, 100.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    kept = masked_whiten(values, mask, shift_mean=False)
    assert kept.tolist()[0] == pytest.approx([7 / 3 - 0.872872, 7 / 3 - 0.218218, 7 / 3 + 1.091089, 0.0], abs=1e-6)


@pytest.mark.parametrize("shown", [0, 1])
def test_whitening_fewer_than_two_values_gives_zeros_and_a_warning(shown, caplog):
    mask = torch.zeros(1, 3)
    mask[0, :shown] = 1
    assert masked_whiten(torch.tensor([[5.0, 6.0, 7.0]]), mask).tolist() == [[0.0, 0.0, 0.0]]
    assert "at least two" in caplog.text


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-50, 50, width=32), st.booleans()), min_size=1, max_size=40))
def test_statistics_agree_with_a_loop(cells):
    values = torch.tensor([value for value, _ in cells], dtype=torch.float64)
    mask = torch.tensor([shown for _, shown in cells])
    kept = [value for value, shown in cells if shown]
    mean = sum(kept) / len(kept) if kept else 0.0
    assert masked_mean(values, mask).item() == pytest.approx(mean, abs=1e-9)
    variance = sum((value - mean) ** 2 for value in kept) / (len(kept) - 1) if len(kept) > 1 else 0.0
    assert masked_var(values, mask).item() == pytest.approx(variance, rel=1e-9, abs=1e-9)
    if len(kept) > 1:
        expected = [(v - mean) / math.sqrt(variance + 1e-8) if shown else 0.0 for v, shown in cells]
        assert masked_whiten(values, mask).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_blocks_cover_all_rows(monkeypatch):
    monkeypatch.setattr(masked, "_BLOCK_ELEMENTS", 10)
    assert [list(range(7))[rows] for rows in row_blocks(torch.zeros(7, 5))] == [[0, 1], [2, 3], [4, 5], [6]]
    assert [list(range(3))[rows] for rows in row_blocks(torch.zeros(3, 50))] == [[0], [1], [2]]
    assert list(row_blocks(torch.zeros(0, 5))) == []


def test_a_common_offset_costs_no_precision(monkeypatch):
    """Values 1e6 + {0, 1, ..., 15}: mean 7.5 above the offset, and Σ (k - 7.5)² = 340, in float32 blocks of one row."""
    monkeypatch.setattr(masked, "_BLOCK_ELEMENTS", 4)
    values = 1e6 + torch.arange(16.0).view(4, 4)
    count, mean, squares = masked_moments(values, torch.ones(4, 4))
    assert (count, mean.item(), squares.item()) == (16, 1e6 + 7.5, pytest.approx(340.0))


def test_whitening_passes_a_gradient_on():
    values = torch.tensor([[1.0, 2.0, 5.0, 4.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 1]])
    assert torch.autograd.gradcheck(lambda x: masked_whiten(x, mask), values)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_a_hidden_weight_reaches_nothing(bad, mask_dtype):
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    total = weighted_sum(values, torch.tensor([1, 0, 1]).to(mask_dtype), torch.tensor([0.5, bad, 0.25]))
    total.backward()
    assert total.item() == 0.5 + 0.75
    assert values.grad.tolist() == [0.5, 0.0, 0.25]


def test_extremes_are_those_of_what_the_mask_shows():
    values, mask = torch.tensor([[3.0, NAN, -2.0, INF]]), torch.tensor([[1, 0, 1, 0]])
    assert (masked_max(values, mask).item(), masked_min(values, mask).item()) == (3.0, -2.0)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)])
def test_extremes_of_nothing_are_infinite(shape):
    nothing = torch.full(shape, NAN), torch.zeros(shape)
    assert (masked_max(*nothing).item(), masked_min(*nothing).item()) == (-INF, INF)
