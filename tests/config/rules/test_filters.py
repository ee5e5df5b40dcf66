from __future__ import annotations

from dataclasses import dataclass

import pytest

from skyrl.config.algorithm import AlgorithmConfig, declares_overlong_again
from skyrl.config.root import SkyRLTrainConfig, make_config
from skyrl.config.rules.filters import check_filters
from skyrl.errors import ConfigError
from tests.config.rules.build import build

SAMPLING = "trainer.algorithm.dynamic_sampling"
OVERLONG = "trainer.algorithm.overlong_buffer_len"


@dataclass
class OwnOverlong(AlgorithmConfig):
    overlong_buffer_len: int | None = 512


@dataclass
class OwnKey(AlgorithmConfig):
    my_weight: float = 0.1


def check(*tokens: str, config_cls: type[SkyRLTrainConfig] = SkyRLTrainConfig) -> None:
    config = build(*tokens, config_cls=config_cls)
    check_filters(config.trainer.algorithm, config.generator)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([f"{SAMPLING}.type=filtr"], r"dynamic_sampling\.type=filtr: must be one of null, filter, replace; did you"),
        ([f"{SAMPLING}.max_sample_batches=0"], r"max_sample_batches=0: must be at least 1, or -1"),
        ([f"{SAMPLING}.max_sample_batches=-2"], r"max_sample_batches=-2: must be at least 1, or -1"),
        ([f"{SAMPLING}.min_replace_ratio=1.5"], r"min_replace_ratio=1\.5: must lie between 0 and 1"),
        ([f"{SAMPLING}.type=replace", f"{SAMPLING}.min_replace_ratio=1"], r"min_replace_ratio=1: .*lower it"),
        ([f"{OVERLONG}=0"], r"overlong_buffer_len=0: must be at least 1 token; null turns"),
        ([f"{OVERLONG}=-5"], r"overlong_buffer_len=-5: must be at least 1"),
        ([f"{OVERLONG}=1025"], r"overlong_buffer_len=1025: must be at most .*max_generate_length=1024"),
        ([f"{OVERLONG}=8", "generator.max_turns=2"], r"overlong_buffer_len=8 .*generator\.max_turns=2; set"),
        (["trainer.algorithm.overlong_buffer_penalty_factor=-1"], r"penalty_factor=-1\.0: must be at least 0"),
    ],
)
def test_what_cannot_filter_or_punish_names_key_value_and_need(tokens: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        check(*tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [f"{SAMPLING}.type=filter", f"{SAMPLING}.max_sample_batches=-1"],
        [f"{SAMPLING}.type=filter", f"{SAMPLING}.min_replace_ratio=1"],
        [f"{SAMPLING}.type=replace", f"{SAMPLING}.min_replace_ratio=0"],
        [f"{OVERLONG}=1024"],
        [f"{OVERLONG}=null", "generator.max_turns=2"],
    ],
)
def test_values_at_the_edge_pass(tokens: list[str]):
    check(*tokens)


def test_groups_of_one_make_dynamic_sampling_idle(caplog):
    check(f"{SAMPLING}.type=filter", "generator.n_samples_per_prompt=2")
    assert caplog.text == ""
    check(f"{SAMPLING}.type=filter", "generator.n_samples_per_prompt=1")
    assert "dynamic_sampling.type=filter" in caplog.text and "does nothing" in caplog.text


def test_a_subclass_with_its_own_punishment_may_take_several_turns():
    check("generator.max_turns=2", config_cls=make_config(algorithm_cls=OwnOverlong))
    with pytest.raises(ConfigError, match=r"generator\.max_turns=2"):
        check(f"{OVERLONG}=8", "generator.max_turns=2", config_cls=make_config(algorithm_cls=OwnKey))


def test_who_owns_the_punishment():
    assert declares_overlong_again(OwnOverlong())
    assert not declares_overlong_again(OwnKey())
    assert not declares_overlong_again(AlgorithmConfig())
