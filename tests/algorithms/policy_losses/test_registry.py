"""What callers learn about a loss before they call it."""

from enum import Enum

import pytest

from skyrl.algorithms.policy_losses import PolicyLossRegistry, reads_old_log_probs, register_policy_loss
from skyrl.algorithms.policy_losses.registry import LossTraits, holds, require_correctable
from skyrl.config.algorithm import AlgorithmConfig, CISPOConfig, OffPolicyCorrectionConfig
from skyrl.errors import ConfigError


def some_loss(log_probs, old_log_probs, advantages):
    return log_probs.sum()


@pytest.fixture
def register():
    """Registers `some_loss` as "mine" for one test."""
    registered = []

    def add(**traits):
        register_policy_loss("mine", **traits)(some_loss)
        registered.append("mine")
        return AlgorithmConfig(policy_loss_type="mine")

    yield add
    for name in registered:
        PolicyLossRegistry.unregister(name)


def test_a_registered_loss_reads_the_old_log_probs_unless_it_says_otherwise(register):
    config = register()
    assert reads_old_log_probs(config)
    assert not holds(PolicyLossRegistry.traits("mine").needs_rollout_logprobs, config)


def test_a_trait_may_depend_on_settings(register):
    config = register(needs_old_logprobs=lambda algorithm: algorithm.cispo.cispo_anchor == "old")
    assert reads_old_log_probs(config)
    config.cispo = CISPOConfig(cispo_anchor="rollout")
    assert not reads_old_log_probs(config)


def test_a_correction_reads_the_old_log_probs(register):
    config = register(needs_old_logprobs=False)
    assert not reads_old_log_probs(config)
    config.off_policy_correction.outlier_token_is_threshold_high = 9.0
    assert reads_old_log_probs(config)


TIS = AlgorithmConfig(off_policy_correction=OffPolicyCorrectionConfig(tis_ratio_type="token"))
MASKS = AlgorithmConfig(off_policy_correction=OffPolicyCorrectionConfig(sequence_mask_metric="product"))


def test_a_loss_that_takes_no_correction_refuses_all_kinds():
    traits = LossTraits(correctable=False)
    require_correctable("mine", traits, AlgorithmConfig())
    for config in (TIS, MASKS):
        with pytest.raises(ConfigError, match=r"'mine' does not work with trainer\.algorithm\.off_policy_correction"):
            require_correctable("mine", traits, config)


def test_a_loss_anchored_on_the_sampler_takes_masks_but_no_importance_weights():
    traits = LossTraits(anchored=True)
    require_correctable("mine", traits, MASKS)
    with pytest.raises(ConfigError, match=r"corrects by the ratio to the sampler already; set .*tis_ratio_type=null"):
        require_correctable("mine", traits, TIS)


def test_an_enum_stands_for_its_value_and_a_name_is_taken_once():
    class Name(Enum):
        MINE = "mine"

    register_policy_loss(Name.MINE)(some_loss)
    try:
        assert PolicyLossRegistry.get("mine") is PolicyLossRegistry.get(Name.MINE) is some_loss
        with pytest.raises(ValueError, match="'mine' is already registered"):
            register_policy_loss("mine")(some_loss)
    finally:
        PolicyLossRegistry.unregister(Name.MINE)
    with pytest.raises(ConfigError, match="unknown policy loss 'mine'"):
        PolicyLossRegistry.get("mine")
