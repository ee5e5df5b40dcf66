from __future__ import annotations

import pytest

from skyrl.backends.skyrl_train.workers.loss_config import effective_loss
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.errors import ConfigError


def test_overrides_reach_nested_fields_of_a_copy() -> None:
    algorithm = AlgorithmConfig(eps_clip_low=0.2)
    name, merged = effective_loss(algorithm, "other", {"eps_clip_low": 0.1, "cispo": {"cispo_eps_clip_high": 9.0}})
    assert (name, merged.policy_loss_type) == ("other", "other")
    assert (merged.eps_clip_low, merged.cispo.cispo_eps_clip_high, merged.cispo.cispo_eps_clip_low) == (0.1, 9.0, 1.0)
    assert isinstance(merged, AlgorithmConfig)
    assert (algorithm.eps_clip_low, algorithm.cispo.cispo_eps_clip_high) == (0.2, 4.0)
    assert algorithm.policy_loss_type == "regular"


def test_without_overrides_the_config_names_its_own_loss() -> None:
    name, merged = effective_loss(AlgorithmConfig())
    assert name == merged.policy_loss_type == "regular"


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(ConfigError, match=r"loss_fn_config.cispo.no_such is no field of CISPOConfig"):
        effective_loss(AlgorithmConfig(), None, {"cispo": {"no_such": 1}})
