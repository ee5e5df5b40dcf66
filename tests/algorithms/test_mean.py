"""A mean as its two sums."""

import torch

from skyrl.algorithms.mean import Mean


def test_masked_values_stay_out_and_booleans_are_shares():
    mean = Mean.over(torch.tensor([1.0, float("nan"), 4.0]), torch.tensor([1.0, 0.0, 0.5]))
    assert (mean.total.item(), mean.count.item(), mean.item()) == (5.0, 2.0, 2.5)
    assert Mean.over(torch.tensor([True, False, True]), torch.tensor([1, 1, 0])).item() == 0.5


def test_a_mean_over_nothing_is_zero():
    assert Mean.over(torch.ones(3), torch.zeros(3)).item() == 0.0


def test_it_carries_no_gradient():
    assert not Mean.over(torch.ones(2, requires_grad=True), torch.ones(2)).total.requires_grad
