from __future__ import annotations

import copy
import os
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest

from skyrl.config.algorithm import AlgorithmConfig
from skyrl.config.base import get_config_as_dict
from skyrl.config.generator import GeneratorConfig
from skyrl.config.root import SkyRLTrainConfig, finalize, make_config
from skyrl.config.trainer import TrainerConfig


def compose(*tokens: str) -> SkyRLTrainConfig:
    return SkyRLTrainConfig.from_cli_overrides(tokens)


def test_finalizing_twice_is_finalizing_once():
    once = compose()
    assert finalize(copy.deepcopy(once)) == once


def test_a_config_built_in_python_finalizes_to_the_composed_one():
    assert finalize(SkyRLTrainConfig()) == compose()


def test_documented_defaults():
    config = compose()
    trainer, generator = config.trainer, config.generator
    engine, algorithm = generator.inference_engine, trainer.algorithm
    assert (trainer.train_batch_size, trainer.policy_mini_batch_size, trainer.micro_train_batch_size_per_gpu) == (
        1024,
        256,
        1,
    )
    assert (trainer.policy.optimizer_config.lr, trainer.critic.optimizer_config.lr) == (1e-6, 5e-6)
    assert (trainer.logger, trainer.seed, trainer.resume_mode) == ("console", 42, "latest")
    assert (engine.weight_sync_backend, engine.weight_proof, engine.model_dtype) == ("auto", "sample", "bfloat16")
    assert (algorithm.kl_loss_coef, algorithm.eps_clip_high, algorithm.clip_ratio_c) == (0.001, 0.2, 3.0)
    assert (generator.n_samples_per_prompt, generator.sampling_params.max_generate_length) == (5, 1024)
    assert config.data.train_data == [os.path.expanduser("~/data/gsm8k/train.parquet")]
    assert (generator.trajectory_timeout_s, generator.env_timeout_s) == (7200, 600)
    assert (engine.control_timeout_s, engine.weight_sync_timeout_s, trainer.worker_timeout_s) == (1800, 600, 7200)


def test_values_follow_their_source_unless_set():
    config = compose("trainer.max_prompt_length=768", "generator.sampling_params.temperature=0.7")
    assert config.generator.max_input_length == 768
    assert config.trainer.algorithm.temperature == 0.7
    assert config.trainer.ref.model.path == config.trainer.policy.model.path
    explicit = compose("generator.sampling_params.temperature=0.7", "trainer.algorithm.temperature=1.0")
    assert explicit.trainer.algorithm.temperature == 1.0
    assert compose("trainer.algorithm.temperature=null").trainer.algorithm.temperature == 1.0


@pytest.mark.parametrize(
    "key",
    [
        "trainer.policy.fsdp_config.mixed_precision",
        "generator.eval_sampling_params",
        "generator.inference_engine.delta_weight_sync",
        "trainer.policy.megatron_config.transformer_config_kwargs",
        "trainer.policy.megatron_config.optimizer_config_kwargs",
        "generator.sampling_params.additional_kwargs",
    ],
)
def test_null_for_a_group_means_its_defaults(key: str):
    assert compose(f"{key}=null") == compose()


def test_one_transformer_override_keeps_the_other_four_and_a_deleted_one_stays_away():
    key = "trainer.policy.megatron_config.transformer_config_kwargs"
    kwargs = compose(f"{key}.recompute_num_layers=4").trainer.policy.megatron_config.transformer_config_kwargs
    assert kwargs == {
        "recompute_granularity": "full",
        "recompute_modules": ["core_attn"],
        "recompute_method": "uniform",
        "recompute_num_layers": 4,
        "gradient_accumulation_fusion": False,
    }
    deleted = finalize(compose(f"~{key}.recompute_method"))
    assert "recompute_method" not in deleted.trainer.policy.megatron_config.transformer_config_kwargs


def test_old_values_become_new_ones():
    with pytest.warns(DeprecationWarning, match="fsdp2"):
        assert compose("trainer.strategy=fsdp2").trainer.strategy == "fsdp"
    assert compose("trainer.resume_mode=null").trainer.resume_mode == "none"
    assert compose("trainer.resume_mode=None").trainer.resume_mode == "none"
    assert compose("generator.inference_engine.weight_sync_backend=rdt").generator.inference_engine == (
        compose("generator.inference_engine.weight_sync_backend=sharded_rdt").generator.inference_engine
    )
    assert compose("trainer.log_example_interval=7").trainer.print_example_interval == 7
    with pytest.warns(DeprecationWarning, match="use_tis"):
        correction = compose(
            "trainer.algorithm.use_tis=true", "trainer.algorithm.tis_imp_ratio_cap=3.0"
        ).trainer.algorithm.off_policy_correction
    assert (correction.tis_ratio_type, correction.token_tis_ratio_clip_high) == ("token", 3.0)


def test_the_run_folder_follows_name_and_exports_and_stays_local():
    assert compose("trainer.export_path=/e", "trainer.run_name=a").trainer.run_dir == "/e/runs/a"
    cloud = compose("trainer.export_path=s3://bucket/e", "trainer.log_path=/logs", "trainer.run_name=a")
    assert cloud.trainer.run_dir == "/logs/runs/a"
    assert compose("trainer.run_dir=/mine").trainer.run_dir == "/mine"


def test_home_is_expanded():
    config = compose("trainer.ckpt_path=~/c", "data.train_data=[~/t.parquet]", "trainer.policy.model.path=~/m")
    home = os.path.expanduser("~")
    assert config.trainer.ckpt_path == f"{home}/c"
    assert config.data.train_data == [f"{home}/t.parquet"]
    assert config.trainer.policy.model.path == f"{home}/m"


def test_delta_folders_are_derived_from_the_store():
    delta = compose("generator.inference_engine.delta_weight_sync.sync_dir=s3://b/run 1").generator.inference_engine
    assert delta.delta_weight_sync.local_checkpoint_dir.endswith("skyrl_delta_checkpoints/s3_b_run_1")
    assert delta.delta_weight_sync.publish_staging_dir.endswith("skyrl_delta_publish_staging/s3_b_run_1")


def test_log_probs_are_switched_on_for_a_loss_that_needs_them():
    config = compose("generator.sampling_params.logprobs=null", "trainer.algorithm.policy_loss_type=rollout_is")
    assert config.generator.sampling_params.logprobs == 1
    assert compose("generator.sampling_params.logprobs=null").generator.sampling_params.logprobs is None


def test_draft_heads_reach_megatron_and_the_engine():
    config = compose("trainer.mtp.enabled=true", "trainer.mtp.loss_weight=0.3", "trainer.mtp.num_speculative_tokens=2")
    assert config.trainer.policy.megatron_config.mtp_loss_weight == 0.3
    assert config.generator.inference_engine.speculative_config == {"method": "mtp", "num_speculative_tokens": 2}
    assert compose().trainer.policy.megatron_config.mtp_num_layers == 0


@dataclass
class DAPOConfig(AlgorithmConfig):
    """Keys that an example adds."""

    overlong_buffer_len: int | None = 512
    penalty: float = 1.0


@dataclass
class OwnTrainerConfig(TrainerConfig):
    """Wins over the algorithm."""

    num_dummy_steps: int = 3


@dataclass
class OwnGeneratorConfig(GeneratorConfig):
    """Keys of a custom generator."""

    miniswe_traj_dir: str = "/tmp/x"


@dataclass
class HarborConfig(SkyRLTrainConfig):
    """An explicit subclass with an open mapping at the root."""

    generator: OwnGeneratorConfig = field(default_factory=OwnGeneratorConfig)
    harbor_trial_config: dict[str, Any] = field(default_factory=dict)


def test_make_config_places_the_users_groups():
    config = make_config(algorithm_cls=DAPOConfig, generator_cls=OwnGeneratorConfig).from_cli_overrides(
        ["trainer.algorithm.penalty=2.5", "generator.miniswe_traj_dir=/y"]
    )
    assert isinstance(config, SkyRLTrainConfig)
    assert isinstance(config.trainer, TrainerConfig)
    assert (config.trainer.algorithm.penalty, config.trainer.algorithm.overlong_buffer_len) == (2.5, 512)
    assert config.generator.miniswe_traj_dir == "/y"


def test_a_trainer_class_wins_over_an_algorithm_class():
    config = make_config(algorithm_cls=DAPOConfig, trainer_cls=OwnTrainerConfig)()
    assert config.trainer.num_dummy_steps == 3
    assert type(config.trainer.algorithm) is AlgorithmConfig


def test_an_explicit_subclass_composes_and_travels():
    config = HarborConfig.from_cli_overrides(["harbor_trial_config.agent.name=x", "generator.miniswe_traj_dir=/z"])
    assert config.harbor_trial_config == {"agent": {"name": "x"}}
    assert pickle.loads(pickle.dumps(config)) == config


def test_added_keys_survive_pickling():
    config = compose("+trainer.note=hi")
    assert get_config_as_dict(pickle.loads(pickle.dumps(config)))["trainer"]["note"] == "hi"
