from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
from omegaconf import OmegaConf

from skyrl.config.base import BaseConfig, field_help, get_config_as_dict, get_config_as_yaml_str
from skyrl.config.generator import SamplingParams
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ConfigError


@dataclass
class Fruit(BaseConfig):
    """A fruit."""

    weight: int = 1
    """Grams."""
    undocumented: int = 2


@dataclass
class Apple(Fruit):
    """An apple."""

    weight: int = 150
    """Grams, without
    the stem."""


def test_help_is_the_sentence_below_a_field_and_bases_are_included():
    assert field_help(Fruit) == {"weight": "Grams."}
    assert field_help(Apple) == {"weight": "Grams, without\nthe stem."}


def undocumented(config: object, path: str) -> list[str]:
    missing = []
    for field in dataclasses.fields(config):
        key, value = f"{path}.{field.name}", getattr(config, field.name)
        if len(field_help(type(config)).get(field.name, "").strip()) < 5:
            missing.append(key)
        if dataclasses.is_dataclass(value):
            missing += undocumented(value, key)
    return missing


def test_every_key_of_the_tree_is_documented():
    assert undocumented(SkyRLTrainConfig(), "") == []


def test_yaml_reads_back_to_the_same_values_with_added_keys():
    config = SkyRLTrainConfig.from_cli_overrides(["+trainer.note.x=[1,2]", "trainer.run_name='true'"])
    back = OmegaConf.to_container(OmegaConf.create(get_config_as_yaml_str(config)))
    assert back == get_config_as_dict(config)
    assert back["trainer"]["note"] == {"x": [1, 2]}
    assert back["trainer"]["run_name"] == "true"


def test_from_dict_config_keeps_the_defaults_of_absent_keys():
    params = SamplingParams.from_dict_config(OmegaConf.create({"temperature": 0.5}))
    assert params == SamplingParams(temperature=0.5)


def test_from_dict_config_refuses_an_unknown_key():
    with pytest.raises(ConfigError, match="temprature"):
        SamplingParams.from_dict_config(OmegaConf.create({"temprature": 0.5}))
