"""The ratio of the old policy to the sampler."""

import math

import torch

from skyrl.algorithms.off_policy.ratio import interval_metrics, log_ratio, ratio_metrics, trained_tokens
from skyrl.algorithms.safe_exp import safe_exp

NAN = float("nan")


def test_any_value_but_zero_trains_and_no_mask_means_everything():
    assert trained_tokens(torch.zeros(1, 3), torch.tensor([[0.0, 0.5, 2.0]])).tolist() == [[False, True, True]]
    assert trained_tokens(torch.zeros(1, 2), None).all()


def test_masked_tokens_have_log_ratio_zero_and_no_gradient_passes():
    old = torch.tensor([[-1.0, NAN, -math.inf]], requires_grad=True)
    diff = log_ratio(old, torch.tensor([[-2.0, 0.0, NAN]]), torch.tensor([[True, False, False]]))
    assert diff.tolist() == [[1.0, 0.0, 0.0]]
    assert not diff.requires_grad


def test_the_exponent_is_bounded():
    assert safe_exp(torch.tensor([-99.0, 99.0], dtype=torch.float64)).tolist() == [math.exp(-20), math.exp(20)]


def test_without_a_trained_token_the_extremes_are_those_of_nothing():
    metrics = ratio_metrics(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool))
    assert {name: value.item() for name, value in metrics.items()} == {
        "is_ratio_mean": 0.0,
        "is_ratio_sq_mean": 0.0,
        "is_ratio_max": -math.inf,
        "is_ratio_min": math.inf,
    }


def test_shares_of_an_interval_are_of_the_counted_rows():
    over = torch.tensor([True, False, False, True])
    under = torch.tensor([False, True, False, False])
    counted = torch.tensor([True, True, True, False])
    shares = interval_metrics("x", over, under, counted)
    third = torch.tensor(1 / 3).item()
    assert {name: value.item() for name, value in shares.items()} == {
        "x_masked_ratio": torch.tensor(2 / 3).item(),
        "x_over_high_ratio": third,
        "x_under_low_ratio": third,
    }
