"""Rows that hold a token of an extreme ratio."""

import pytest
import torch

from skyrl.algorithms.off_policy import compute_outlier_token_mask
from skyrl.config.algorithm import OffPolicyCorrectionConfig

RATIOS = [[2.718282, 1.0, 0.606531], [1.0, 1.0, 1.0], [1.0, 0.01, 9.0]]


def outlier_mask(ratios, mask=None, low=None, high=None):
    old = torch.tensor(ratios, dtype=torch.float64).log()
    mask = torch.ones_like(old) if mask is None else torch.tensor(mask)
    config = OffPolicyCorrectionConfig(outlier_token_is_threshold_low=low, outlier_token_is_threshold_high=high)
    kept, metrics = compute_outlier_token_mask(old, torch.zeros_like(old), mask, config)
    shares = [metrics[f"outlier_seq_{name}_ratio"].item() for name in ("masked", "over_high", "under_low")]
    return kept.tolist(), shares


def test_one_token_above_the_threshold_drops_its_row():
    assert outlier_mask(RATIOS[:1], high=2.0) == ([[0.0]], [1.0, 1.0, 0.0])


def test_each_bound_works_alone_and_shares_overlap():
    third = pytest.approx(1 / 3)
    assert outlier_mask(RATIOS, high=2.0) == ([[0.0], [1.0], [0.0]], [pytest.approx(2 / 3), pytest.approx(2 / 3), 0.0])
    assert outlier_mask(RATIOS, low=0.1) == ([[1.0], [1.0], [0.0]], [third, 0.0, third])
    assert outlier_mask(RATIOS, low=0.1, high=5.0) == ([[1.0], [1.0], [0.0]], [third, third, third])


def test_masked_tokens_drop_nothing_and_empty_rows_count_nowhere():
    mask = [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    assert outlier_mask(RATIOS, mask, high=2.0) == ([[1.0], [1.0], [0.0]], [0.5, 0.5, 0.0])
