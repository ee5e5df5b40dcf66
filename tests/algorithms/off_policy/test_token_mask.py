"""The mask of single tokens (IcePop)."""

import pytest
import torch

from skyrl.algorithms.off_policy import compute_token_mask
from skyrl.config.algorithm import OffPolicyCorrectionConfig
from skyrl.errors import ConfigError


def token_mask(ratios, mask, low=0.5, high=2.0):
    old = torch.tensor(ratios, dtype=torch.float64).log()
    config = OffPolicyCorrectionConfig(token_mask_is_threshold_low=low, token_mask_is_threshold_high=high)
    return compute_token_mask(old, torch.zeros_like(old), torch.tensor(mask), config)


def test_tokens_outside_the_interval_are_dropped():
    kept, metrics = token_mask([[2.718282, 1.0, 0.606531]], [[1.0, 1.0, 1.0]])
    assert kept.tolist() == [[0.0, 1.0, 1.0]]
    assert metrics["token_mask_ratio"].item() == pytest.approx(1 / 3)


def test_both_bounds_belong_to_the_interval():
    """Log-probs 0 give the ratio 1 exactly."""
    assert token_mask([[1.0]], [[1.0]], low=1.0, high=1.5)[0].tolist() == [[1.0]]
    assert token_mask([[1.0]], [[1.0]], low=0.5, high=1.0)[0].tolist() == [[1.0]]


def test_masked_tokens_count_nowhere():
    kept, metrics = token_mask([[9.0, float("nan"), 0.1, 1.0]], [[0.0, 0.0, 1.0, 1.0]])
    assert kept.tolist() == [[1.0, 1.0, 0.0, 1.0]]
    assert metrics["token_mask_ratio"].item() == 0.5


@pytest.mark.parametrize(("low", "high"), [(0.5, None), (None, 2.0)])
def test_one_bound_alone_is_refused(low, high):
    with pytest.raises(ConfigError, match=r"set both token_mask_is_threshold_low and token_mask_is_threshold_high"):
        token_mask([[1.0]], [[1.0]], low=low, high=high)
