from __future__ import annotations

import pytest

from skyrl.config.roles import ModelConfig
from skyrl.config.root import SkyRLTrainConfig
from skyrl.config.schema import describe_type, is_declared, key_paths, structured_node, suggest

NODE = structured_node(SkyRLTrainConfig, SkyRLTrainConfig.SOURCES)

OPEN = [
    "trainer.policy.fsdp_config.wrap_policy",
    "trainer.critic.model_config_kwargs",
    "trainer.policy.megatron_config.optimizer_config_kwargs",
    "trainer.ref.megatron_config.transformer_config_kwargs",
    "trainer.ref.megatron_config.model_config_kwargs",
    "trainer.algorithm.reward_weights",
    "generator.chat_template_kwargs",
    "generator.sampling_params.additional_kwargs",
    "generator.eval_sampling_params.additional_kwargs",
    "generator.inference_engine.engine_init_kwargs",
    "generator.inference_engine.speculative_config",
    "generator.inference_engine.router_init_kwargs",
    "generator.inference_engine.prefill_init_kwargs",
    "generator.inference_engine.decode_init_kwargs",
]


@pytest.mark.parametrize("key", OPEN)
def test_open_mappings_take_any_sub_key_without_a_plus(key: str):
    assert is_declared(NODE, f"{key}.anything.below")
    group = SkyRLTrainConfig.from_cli_overrides([f"{key}.k=1", f"{key}.j.i=2", f"{key}={{h: 3}}", f"~{key}.k"])
    for name in key.split("."):
        group = getattr(group, name)
    assert "k" not in group
    assert group["j"] == {"i": 2}
    assert group["h"] == 3


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("trainer.policy.model.pth", "trainer.policy.model.path"),
        ("trainer.polcy.model.pth", "trainer.policy.model.path"),
        ("tainer.sed", "trainer.seed"),
        ("train_batch_size", "trainer.train_batch_size"),
        ("trainer.policy.lr", "trainer.policy.optimizer_config.lr"),
        ("generator.temperature", "generator.sampling_params.temperature"),
        ("generator.inference_engines.engine_init_kwargs.x.y", "generator.inference_engine.engine_init_kwargs.x.y"),
        ("trainer.xyzzy", None),
    ],
)
def test_a_typo_finds_the_key_that_was_meant(typo: str, meant: str | None):
    assert suggest(NODE, typo) == meant


def test_paths_hold_groups_and_leaves():
    paths = key_paths(NODE)
    assert {"data", "trainer.policy.model", "trainer.policy.model.lora.rank"} <= set(paths)
    assert len(paths) == len(set(paths))


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "an integer"),
        (float | None, "a number, or null"),
        (bool | int, "true or false or an integer"),
        (list[str], "a list of texts, such as [a,b]"),
        (dict[str, int], "a mapping, such as {key: value}"),
        (ModelConfig, "a group of settings; set its keys one by one"),
    ],
)
def test_types_are_described_in_words(hint: object, words: str):
    assert describe_type(hint) == words
