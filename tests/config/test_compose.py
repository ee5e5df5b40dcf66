from __future__ import annotations

import pytest

from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ConfigError


def compose(*tokens: str) -> SkyRLTrainConfig:
    return SkyRLTrainConfig.from_cli_overrides(tokens)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("trainer.policy.model.pth=x", r"trainer\.policy\.model\.pth; did you mean trainer\.policy\.model\.path"),
        ("++trainer.seed.x=1", r"trainer\.seed\.x; trainer\.seed is a single value"),
        ("~trainer.sed", r"trainer\.sed; did you mean trainer\.seed"),
        ("~trainer.seed", "cannot be deleted"),
        ("+trainer.polcy.model.path=x", r"did you mean trainer\.policy\.model\.path"),
        ("trainer.xyzzy=1", r"\+trainer\.xyzzy=VALUE"),
        ("trainer.policy.model={pth: x}", r"did you mean trainer\.policy\.model\.path"),
        ("trainer.seed=abc", "trainer.seed=abc: must be an integer"),
        ("trainer.epochs=1.0", "trainer.epochs=1.0: must be an integer"),
        ("trainer.bf16=null", "trainer.bf16=null: must be true or false"),
        ("data.train_data=abc", "data.train_data=abc: must be a list of texts"),
        ("trainer=3", "trainer=3: must be a group of settings"),
        ("+recipe=nosuch", "quickstart"),
        ("trainer.seed=1,2", r"^trainer\.seed=1,2: .* needs --multirun; .* 'trainer\.seed=\[1,2\]'$"),
    ],
)
def test_a_wrong_override_is_explained(token: str, message: str):
    with pytest.raises(ConfigError, match=message):
        compose(token)


def test_a_close_match_hides_the_advice_to_add_the_key():
    with pytest.raises(ConfigError) as error:
        compose("trainer.policy.model.pth=x")
    assert "+" not in str(error.value)


def test_keys_can_be_added_with_a_plus():
    config = compose("+trainer.new=1", "+generator.mine.a={b: [1]}", "++trainer.polcy.x=2")
    assert config.trainer.new == 1
    assert config.generator.mine == {"a": {"b": [1]}}
    assert config.trainer.polcy == {"x": 2}


def test_environments_of_users_get_their_own_group():
    config = compose("+environment.skyrl_gym.searches.depth=2")
    assert config.environment.skyrl_gym.searches == {"depth": 2}


def test_untouched_siblings_keep_their_documented_defaults():
    config = compose(
        "trainer.critic.optimizer_config.max_grad_norm=0.5",
        "trainer.policy.model.lora.rank=8",
        "generator.eval_sampling_params.top_p=0.9",
        "generator.sampling_params.max_generate_length=2048",
    )
    assert config.trainer.critic.optimizer_config.lr == 5e-6
    assert config.trainer.policy.model.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert config.generator.eval_sampling_params.temperature == 0.0
    assert config.generator.eval_sampling_params.max_generate_length == 2048


@pytest.mark.parametrize("value", ["['a.parquet']", '["a.parquet"]', "[a.parquet]"])
def test_lists_of_files_parse_in_all_three_spellings(value: str):
    assert compose(f"data.train_data={value}").data.train_data == ["a.parquet"]


@pytest.mark.parametrize(
    "key",
    [
        "environment.env_class",
        "trainer.critic.model.path",
        "trainer.policy.megatron_config.expert_tensor_parallel_size",
        "trainer.algorithm.dynamic_sampling.type",
        "generator.sampling_params.logprobs",
        "data.val_data",
        "trainer.resume_mode",
    ],
)
def test_keys_of_recipes_accept_null(key: str):
    compose(f"{key}=null")


def test_unions_of_recipes_parse():
    assert compose("trainer.logger=['console','wandb']").trainer.logger == ["console", "wandb"]
    lora = compose("trainer.policy.model.lora.target_modules=[q_proj,v_proj]").trainer.policy.model.lora
    assert lora.target_modules == ["q_proj", "v_proj"]
    for value, typed in (("4", 4), ("false", False)):
        fsdp = compose(f"trainer.policy.fsdp_config.reshard_after_forward={value}").trainer.policy.fsdp_config
        assert fsdp.reshard_after_forward is typed or fsdp.reshard_after_forward == typed


def test_json_mappings_and_single_keys_reach_the_engine():
    config = compose('generator.inference_engine.engine_init_kwargs={"a": "b", "n": {"x": [1, 2]}}')
    assert config.generator.inference_engine.engine_init_kwargs == {"a": "b", "n": {"x": [1, 2]}}
    config = compose("generator.inference_engine.engine_init_kwargs.max_model_len=9000")
    assert config.generator.inference_engine.engine_init_kwargs == {"max_model_len": 9000}


def test_a_dict_of_overrides_keeps_types():
    config = SkyRLTrainConfig.from_cli_overrides(
        {
            "trainer.run_name": "true",
            "trainer.critic.model.path": None,
            "trainer.project_name": "projekt 😀 ümlaut",
            "generator.inference_engine.engine_init_kwargs": {"x": ["1", 1, None]},
        }
    )
    assert config.trainer.run_name == "true"
    assert config.trainer.critic.model.path is None
    assert config.trainer.project_name == "projekt 😀 ümlaut"
    assert config.generator.inference_engine.engine_init_kwargs == {"x": ["1", 1, None]}


def test_a_later_duplicate_wins():
    assert compose("trainer.seed=1", "trainer.seed=2").trainer.seed == 2


def test_a_preset_applies_and_the_users_keys_win_wherever_they_stand():
    before = compose("trainer.train_batch_size=32", "+recipe=quickstart")
    after = compose("+recipe=quickstart", "trainer.train_batch_size=32")
    assert before == after
    assert before.trainer.train_batch_size == 32
    assert before.generator.n_samples_per_prompt == 8
