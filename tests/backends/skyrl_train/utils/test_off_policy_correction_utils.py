"""Upstream's import path, used as upstream's losses use it."""

import pytest
import torch

from skyrl.algorithms import off_policy
from skyrl.backends.skyrl_train.utils import off_policy_correction_utils as upstream
from skyrl.config.algorithm import OffPolicyCorrectionConfig


def test_every_name_is_the_homes_own_function():
    home = vars(off_policy) | {"off_policy_correction_enabled": off_policy.is_active}
    assert {name: getattr(upstream, name) for name in upstream.__all__} == {
        name: home[name] for name in upstream.__all__
    }


def test_the_pieces_put_together_by_hand_are_the_whole():
    """Ratios 4, 1 and .2 of one row: the token mask drops the last, the cap of 2 lowers the first."""
    config = OffPolicyCorrectionConfig(
        tis_ratio_type="token", token_mask_is_threshold_low=0.5, token_mask_is_threshold_high=5.0
    )
    assert upstream.off_policy_correction_enabled(config)
    old, sampler, mask = torch.tensor([[4.0, 1.0, 0.2]]).log(), torch.zeros(1, 3), torch.ones(1, 3)
    kept, _ = upstream.compute_token_mask(old, sampler, mask, config)
    weights, _ = upstream.compute_tis_ratio(old, sampler, mask * kept, "token", config)
    by_hand = torch.ones(1, 3) * weights * kept
    loss, left, _ = upstream.apply_off_policy_correction(torch.ones(1, 3), old, sampler, mask, config)
    assert by_hand.tolist() == (loss * left).tolist() == [pytest.approx([2.0, 1.0, 0.0])]
