"""Rows dropped by the geometric mean or the product of their ratios."""

import pytest
import torch

from skyrl.algorithms.off_policy import compute_sequence_mask
from skyrl.config.algorithm import OffPolicyCorrectionConfig
from skyrl.errors import ConfigError

OLD = torch.tensor([[-1.0, -1.0, -1.0]])
SAMPLER = torch.tensor([[-2.0, -1.0, -0.5]])  # the product is e^.5 = 1.648721, the geometric mean e^(.5/3) = 1.181360


def sequence_mask(metric, mask=None, old=OLD, sampler=SAMPLER, **fields):
    mask = torch.ones_like(old) if mask is None else mask
    kept, metrics = compute_sequence_mask(old, sampler, mask, metric, OffPolicyCorrectionConfig(**fields))
    prefix = {"geometric": "geo", "product": "product"}[metric]
    names = [f"{prefix}_sequence_mask_{name}_ratio" for name in ("masked", "over_high", "under_low")]
    assert list(metrics) == names
    return kept.flatten().tolist(), [metrics[name].item() for name in names]


def test_the_geometric_mean_drops_what_the_product_keeps():
    assert sequence_mask("geometric", geo_mask_low=0.99, geo_mask_high=1.01) == ([0.0], [1.0, 1.0, 0.0])
    assert sequence_mask("product", product_mask_low=0.5, product_mask_high=2.0) == ([1.0], [0.0, 0.0, 0.0])


@pytest.mark.parametrize(("low", "high", "kept"), [(1.18, 1.19, 1.0), (1.1814, 1.19, 0.0), (1.0, 1.1813, 0.0)])
def test_the_geometric_mean_has_the_spec_value(low, high, kept):
    assert sequence_mask("geometric", geo_mask_low=low, geo_mask_high=high)[0] == [kept]


@pytest.mark.parametrize(("low", "high", "kept"), [(1.6487, 1.6488, 1.0), (1.6488, 2.0, 0.0), (1.0, 1.6487, 0.0)])
def test_the_product_has_the_spec_value(low, high, kept):
    assert sequence_mask("product", product_mask_low=low, product_mask_high=high)[0] == [kept]


def test_a_lower_row_falls_short():
    assert sequence_mask("product", old=SAMPLER, sampler=OLD, product_mask_low=0.7) == ([0.0], [1.0, 0.0, 1.0])


@pytest.mark.parametrize("metric", ["geometric", "product"])
def test_a_fully_masked_row_has_ratio_one_is_kept_and_counts_in_no_share(metric):
    nan = torch.full((1, 3), float("nan"))
    old, sampler = torch.cat([nan, OLD]), torch.cat([SAMPLER, SAMPLER])
    mask = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    fields = {"geo_mask_high": 1.01, "product_mask_high": 1.01}
    assert sequence_mask(metric, mask, old, sampler, **fields) == ([1.0, 0.0], [1.0, 1.0, 0.0])


def test_an_unknown_metric_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"sequence_mask_metric=geometrical: .*did you mean geometric\?"):
        compute_sequence_mask(OLD, SAMPLER, torch.ones(1, 3), "geometrical", OffPolicyCorrectionConfig())
