"""Truncated importance weights of tokens and sequences."""

import math

import pytest
import torch

from skyrl.algorithms.off_policy import compute_tis_ratio
from skyrl.config.algorithm import OffPolicyCorrectionConfig
from skyrl.errors import ConfigError

OLD = torch.tensor([[-1.0, -1.0, -1.0]])
SAMPLER = torch.tensor([[-2.0, -1.0, -0.5]])
ONES = torch.ones(1, 3)


def tis(kind, mask=ONES, old=OLD, sampler=SAMPLER, **fields):
    return compute_tis_ratio(old, sampler, mask, kind, OffPolicyCorrectionConfig(**fields))


def test_a_token_weighs_its_ratio_up_to_the_cap():
    """e^1, e^0 and e^-.5; the cap of 2 lowers one of the three."""
    weights, metrics = tis("token", token_tis_ratio_clip_high=2.0)
    assert weights.tolist() == [pytest.approx([2.0, 1.0, 0.606531], abs=1e-6)]
    assert metrics["tis_token_clip_high_ratio"].item() == pytest.approx(1 / 3)


@pytest.mark.parametrize(("cap", "expected", "share"), [(5.0, 1.648721, 0.0), (1.5, 1.5, 1.0)])
def test_a_sequence_weighs_the_product_of_its_ratios(cap, expected, share):
    """e^(1 + 0 - .5)."""
    weights, metrics = tis("sequence", sequence_tis_ratio_clip_high=cap)
    assert weights.tolist() == [[pytest.approx(expected, abs=1e-6)]]
    assert metrics["tis_seq_clip_high_ratio"].item() == share


def test_an_infinite_cap_leaves_the_ratio():
    weights, metrics = tis("token", token_tis_ratio_clip_high=math.inf)
    assert weights.tolist() == [pytest.approx([math.e, 1.0, 0.606531], abs=1e-6)]
    assert metrics["tis_token_clip_high_ratio"].item() == 0.0


def test_ratios_stay_finite():
    old, sampler = torch.tensor([[0.0, -300.0]]), torch.tensor([[-300.0, 0.0]])
    weights, _ = tis("token", torch.ones(1, 2), old, sampler, token_tis_ratio_clip_high=math.inf)
    assert weights.tolist() == [pytest.approx([math.exp(20), math.exp(-20)], rel=1e-5)]


def test_the_mask_decides_what_a_sequence_multiplies():
    """Without its first token the row has e^-.5; a row without tokens has 1 and counts in no share."""
    mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    weights, metrics = tis("sequence", mask, OLD.repeat(2, 1), SAMPLER.repeat(2, 1), sequence_tis_ratio_clip_high=0.5)
    assert weights.tolist() == [[0.5], [0.5]]  # both are capped
    assert metrics["tis_seq_clip_high_ratio"].item() == 1.0
    weights, _ = tis("sequence", mask, OLD.repeat(2, 1), SAMPLER.repeat(2, 1))
    assert weights.flatten().tolist() == pytest.approx([0.606531, 1.0], abs=1e-6)


def test_weights_carry_no_gradient():
    old = OLD.clone().requires_grad_()
    weights, metrics = tis("token", old=old)
    assert not weights.requires_grad
    assert not metrics["tis_token_clip_high_ratio"].total.requires_grad


def test_half_precision_is_computed_in_float32():
    weights, _ = tis("token", old=OLD.bfloat16(), sampler=SAMPLER.bfloat16(), token_tis_ratio_clip_high=9.0)
    assert weights.dtype == torch.float32
    assert weights[0, 0].item() == pytest.approx(math.e, abs=1e-6)


def test_an_unknown_type_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"tis_ratio_type=tokens: .*did you mean token\?"):
        tis("tokens")
