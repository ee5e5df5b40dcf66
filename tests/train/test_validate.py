from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest

from skyrl.algorithms.advantages import AdvantageEstimatorRegistry, register_advantage_estimator
from skyrl.algorithms.policy_losses import PolicyLossRegistry, register_policy_loss
from skyrl.algorithms.policy_losses.registry import holds
from skyrl.algorithms.signatures import named_keywords
from skyrl.config.algorithm import AlgorithmConfig, CISPOConfig
from skyrl.config.root import SkyRLTrainConfig
from skyrl.config.rules.algorithm import KL_ESTIMATORS, LOSS_REDUCTIONS
from skyrl.config.rules.methods import ESTIMATORS, LOSSES, loss_facts
from skyrl.config.rules.trainer import check_loggers
from skyrl.config.rules.unbuilt import UNBUILT
from skyrl.errors import ConfigError
from skyrl.train.validate import check_algorithm_names, validate_cfg, validate_generator_cfg
from skyrl.utils.registry import Registry

ENGINE = "generator.inference_engine"
PLACE = "trainer.placement"
GSM8K_RECIPE = [
    "data.train_data=['/data/gsm8k/train.parquet']",
    "data.val_data=['/data/gsm8k/validation.parquet']",
    "trainer.algorithm.advantage_estimator=grpo",
    "trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct",
    "trainer.placement.colocate_all=true",
    "trainer.strategy=fsdp",
    *(f"trainer.placement.{role}_num_gpus_per_node=4" for role in ("policy", "ref", "critic")),
    f"{ENGINE}.num_engines=4",
    f"{ENGINE}.tensor_parallel_size=1",
    f"{ENGINE}.backend=vllm",
    f"{ENGINE}.run_engines_locally=true",
    f"{ENGINE}.weight_sync_backend=nccl",
    f"{ENGINE}.async_engine=true",
    f"{ENGINE}.gpu_memory_utilization=0.8",
    "trainer.epochs=20",
    "trainer.train_batch_size=1024",
    "trainer.policy_mini_batch_size=256",
    "trainer.micro_forward_batch_size_per_gpu=64",
    "trainer.micro_train_batch_size_per_gpu=64",
    "trainer.use_sample_packing=true",
    "trainer.flash_attn=true",
    "trainer.use_expandable_segments=true",
    "trainer.policy.optimizer_config.lr=1.0e-6",
    "trainer.algorithm.use_kl_loss=true",
    "generator.batched=true",
    "generator.n_samples_per_prompt=5",
    "generator.sampling_params.max_generate_length=1024",
    "generator.apply_overlong_filtering=true",
    "environment.env_class=gsm8k",
    'trainer.logger="console"',
    "trainer.resume_mode=null",
]


def compose(*tokens: str) -> SkyRLTrainConfig:
    return SkyRLTrainConfig.from_cli_overrides(tokens)


def test_the_defaults_pass_unchanged():
    config = compose()
    before = copy.deepcopy(config)
    validate_cfg(config)
    assert config == before


@pytest.mark.filterwarnings("ignore:trainer.use_sample_packing")
def test_upstreams_gsm8k_recipe_passes():
    validate_cfg(compose(*GSM8K_RECIPE))


def test_the_quickstart_preset_passes():
    validate_cfg(compose("+recipe=quickstart"))


def test_the_generators_rules_can_run_alone():
    validate_generator_cfg(compose("trainer.train_batch_size=7"))
    with pytest.raises(ConfigError, match="logprobs=2"):
        validate_generator_cfg(compose("generator.sampling_params.logprobs=2"))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["generator.max_input_length=4096"], r"max_input_length=4096: must equal trainer\.max_prompt_length=512"),
        (["generator.max_input_length=512", "trainer.max_prompt_length=768", "generator.max_turns=3"], "at least"),
        (["generator.batched=true", "generator.max_turns=2"], r"generator\.batched"),
        (["generator.batched=true", "generator.chat_template_kwargs.a=1"], "chat_template_kwargs"),
        (["generator.merge_stepwise_output=true"], "step_wise_trajectories"),
        (["generator.on_error=ignore"], "mask, raise"),
        (["generator.max_failed_fraction=1.5"], "between 0 and 1"),
        (["generator.eval_sampling_params.logprobs=2"], r"eval_sampling_params\.logprobs=2"),
        (["generator.sampling_params.top_p=0.0"], "top_p"),
        (["generator.sampling_params.temperature=0.0"], r"trainer\.algorithm\.temperature"),
        (["generator.env_timeout_s=0"], "env_timeout_s"),
        (["generator.rate_limit.trajectories_per_second=0.0"], "trajectories_per_second"),
        (["generator.rate_limit.max_concurrency=0"], "max_concurrency"),
        (["trainer.max_training_steps=0"], "max_training_steps=0"),
        (["trainer.max_ckpts_to_keep=0"], "max_ckpts_to_keep=0"),
        (["trainer.resume_mode=sometimes"], "none, latest, from_path"),
        (["trainer.resume_mode=from_path"], "resume_path"),
        (["trainer.logprobs_chunk_size=null"], "logprobs_chunk_size"),
        (["trainer.policy.model.path=null"], r"trainer\.policy\.model\.path=null"),
        (["trainer.policy.optimizer_config.scheduler=cosin"], "did you mean cosine"),
        (["trainer.policy.optimizer_config.adam_betas=[0.9]"], "two numbers"),
        (["trainer.policy_mini_batch_size=48"], r"=48 must divide trainer\.train_batch_size=1024; try 32 or 64"),
        (["data.dataloader.num_workers=0", "data.dataloader.persistent_workers=true"], "num_workers above 0"),
        (["data.train_data=[]"], "at least one"),
        (["trainer.algorithm.use_kl_in_reward=true"], r"use_kl_loss=true .*use_kl_in_reward=true"),
        (["trainer.algorithm.loss_reduction=seq_mean_token_sum_norm"], "max_seq_len"),
        (["trainer.algorithm.loss_reduction=mean"], "token_mean"),
        (["trainer.algorithm.advantage_estimator=gae"], r"trainer\.critic\.model\.path"),
        (["trainer.algorithm.kl_estimator_type=k9"], "k1, k2, k3, abs"),
        (["trainer.algorithm.kl_ctrl.type=pid"], "fixed, adaptive"),
        (
            [
                "trainer.algorithm.kl_ctrl.type=adaptive",
                "trainer.algorithm.kl_ctrl.horizon=1024",
                "trainer.algorithm.use_kl_in_reward=true",
                "trainer.algorithm.use_kl_loss=false",
                "generator.n_samples_per_prompt=5",  # 0.2 * 1024 * 5 = the horizon
            ],
            r"kl_ctrl\.horizon=1024: must be above 1024, .* set it to 10000",
        ),
        (["trainer.algorithm.dynamic_sampling.type=drop"], "filter, replace"),
        (["trainer.algorithm.off_policy_correction.token_mask_is_threshold_low=0.5"], "token_mask_is_threshold_high"),
        (
            ["trainer.algorithm.off_policy_correction.geo_mask_low=2.0"],
            r"geo_mask_low=2.0 must be below",
        ),
        ([f"{PLACE}.policy_num_gpus_per_node=0"], "policy_num_gpus_per_node=0"),
        ([f"{PLACE}.policy_num_gpus_per_node=4", f"{ENGINE}.num_engines=2"], "colocate_all.*= 4, .*= 2"),
        ([f"{PLACE}.colocate_all=false", f"{PLACE}.policy_num_gpus_per_node=2"], "colocate_policy_ref"),
        ([f"{ENGINE}.run_engines_locally=false", f"{PLACE}.colocate_all=false"], "external_proxy_url"),
        ([f"{ENGINE}.external_proxy_url=http://a"], r"external_proxy_url needs .*colocate_all=false"),
        ([f"{ENGINE}.external_server_urls=[a]", f"{PLACE}.colocate_all=false"], "http://"),
        ([f"{ENGINE}.expert_parallel_size=2"], r"expert_parallel_size=2.*data_parallel_size"),
        ([f"{ENGINE}.weight_sync_backend=ncll"], "did you mean nccl"),
        ([f"{ENGINE}.weight_sync_backend=delta"], r"weight_sync_backend=delta .*colocate_all"),
        (
            [f"{ENGINE}.weight_sync_backend=delta", f"{PLACE}.colocate_all=false", "trainer.policy.model.lora.rank=8"],
            r"weight_sync_backend=delta .*lora\.rank",
        ),
        ([f"{ENGINE}.offload_kv_for_weight_sync=true"], r"offload_kv_for_weight_sync.*colocate_all"),
        (
            [
                f"{ENGINE}.enable_return_routed_experts=true",
                "trainer.policy.megatron_config.moe_enable_routing_replay=true",
            ],
            r"enable_return_routed_experts=true needs .*distributed_executor_backend=mp",
        ),
        (
            [
                f"{ENGINE}.enable_return_routed_experts=true",
                "trainer.policy.megatron_config.moe_enable_routing_replay=true",
                "trainer.ref.megatron_config.transformer_config_kwargs.moe_router_fusion=true",
            ],
            r"moe_enable_routing_replay=true .*ref.*moe_router_fusion",
        ),
        (
            [f"{ENGINE}.distributed_executor_backend=mp", f"{ENGINE}.tensor_parallel_size=2"]
            + [f"{PLACE}.{role}_num_nodes=2" for role in ("policy", "ref")],
            r"distributed_executor_backend=mp .*policy_num_gpus_per_node=1",
        ),
        ([f'{ENGINE}.engine_init_kwargs={{"rope_theta": 1}}'], r"hf_overrides\.rope_parameters"),
        ([f"{ENGINE}.engine_init_kwargs.hf_overrides.rope_parameters={{a:1}}"], "must equal"),
        ([f"{ENGINE}.language_model_only=true"], r"trainer\.policy\.language_model_only"),
        ([f"{ENGINE}.gpu_memory_utilization=1.5"], "gpu_memory_utilization"),
        (["trainer.mtp.enabled=true", "trainer.policy.megatron_config.mtp_num_layers=0"], "mtp_num_layers"),
        (["environment.skyrl_gym.max_env_workers=-1"], "max_env_workers"),
    ],
)
def test_settings_that_cannot_run_name_key_and_need(tokens: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        validate_cfg(compose(*tokens))


@pytest.mark.parametrize(
    "tokens",
    [
        ["generator.max_input_length=4096", "generator.max_turns=3"],
        ["generator.rate_limit.enabled=true", "generator.rate_limit.max_concurrency=16"],
        [
            *(f"{PLACE}.{role}_num_gpus_per_node=4" for role in ("policy", "ref")),
            f"{ENGINE}.num_engines=2",
            f"{ENGINE}.tensor_parallel_size=2",
        ],
        [f"{PLACE}.colocate_all=false", f"{ENGINE}.run_engines_locally=false", f"{ENGINE}.external_proxy_url=http://a"],
        ["trainer.algorithm.use_kl_loss=false", "trainer.algorithm.use_kl_in_reward=true"],
        ["trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=a/b"],
        ["trainer.algorithm.loss_reduction=seq_mean_token_sum_norm", "trainer.algorithm.max_seq_len=100"],
        [f"{ENGINE}.weight_sync_backend=gloo"],
    ],
)
def test_settings_that_can_run(tokens: list[str]):
    validate_cfg(compose(*tokens))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.strategy", "megatron"),
        ("trainer.policy.model.lora.rank", "8"),
        ("trainer.policy.optimizer_config.offload_after_step", "false"),
        ("trainer.policy.optimizer_config.scheduler", "reduce_lr_on_plateau"),
        ("trainer.ref.fsdp_config.mixed_precision.buffer_dtype", "bf16"),
        ("trainer.max_tokens_per_microbatch", "4096"),
        ("generator.step_wise_trajectories", "true"),
        ("generator.vision_language_generator", "true"),
        ("generator.chat_template.name_or_path", "qwen"),
        (f"{ENGINE}.weight_proof", "full"),
        (f"{ENGINE}.fp8_weight_sync_mode", "blockwise"),
        (f"{ENGINE}.enable_return_sample_support_set", "true"),
    ],
)
def test_a_feature_that_is_not_built_is_refused_by_key_and_value(key: str, value: str):
    config = compose(f"{key}={value}")
    with pytest.raises(ConfigError, match=f"{key}=.*not built yet"):
        validate_cfg(config)


def test_sequence_parallelism_is_refused_once_it_divides():
    with pytest.raises(ConfigError, match=r"sequence_parallel_size=2.*not built yet"):
        tokens = [f"{PLACE}.{role}_num_gpus_per_node=2" for role in ("policy", "ref")]
        validate_cfg(compose("trainer.policy.sequence_parallel_size=2", f"{ENGINE}.num_engines=2", *tokens))


def test_every_refusal_names_a_key_whose_default_passes():
    config = compose()
    for entry in UNBUILT:
        value: object = config
        for name in entry.key.split("."):
            value = getattr(value, name)
        assert not entry.is_asked(value), entry.key


def test_what_needs_the_engines_candidates_is_refused_by_the_switch_that_asks_for_them():
    centered = ["trainer.algorithm.score_centering.enabled=true", "trainer.algorithm.policy_loss_type=reinforce"]
    with pytest.raises(ConfigError, match=r"score_centering\.enabled=true: not built yet"):
        validate_cfg(compose(*centered))
    replayed = ["enable_sample_support_replay=true", "sample_support_max_top_k=20"]
    tokens = [f"trainer.algorithm.{token}" for token in replayed]
    with pytest.raises(ConfigError, match=r"enable_sample_support_replay=true: not built yet"):
        validate_cfg(
            compose(*tokens, f"{ENGINE}.enable_return_sample_support_set=true", "generator.sampling_params.top_k=20")
        )


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"policy_loss_type=regulr.*did you mean regular"):
        validate_cfg(compose("trainer.algorithm.policy_loss_type=regulr"))
    with pytest.raises(ConfigError, match=r"advantage_estimator=grppo.*did you mean grpo"):
        validate_cfg(compose("trainer.algorithm.advantage_estimator=grppo"))


def test_a_name_that_the_run_may_still_register_is_a_warning_first(caplog):
    cfg = compose("trainer.algorithm.policy_loss_type=of_the_controller")
    validate_cfg(cfg, names_may_follow=True)
    assert "policy_loss_type=of_the_controller" in caplog.text
    with pytest.raises(ConfigError, match="of_the_controller"):
        check_algorithm_names(cfg)


def built_in(registry: Registry) -> set[str]:
    names = registry.list_available()
    return {name for name in names if registry.get(name).__module__.startswith("skyrl.algorithms.")}


def test_the_names_that_the_config_knows_are_those_of_the_algorithms():
    from skyrl.algorithms import kl, loss_reduction

    assert set(LOSS_REDUCTIONS) == set(loss_reduction.LOSS_REDUCTIONS)
    assert set(KL_ESTIMATORS) == set(kl.KL_ESTIMATORS)
    assert set(ESTIMATORS) == built_in(AdvantageEstimatorRegistry)
    assert set(LOSSES) == built_in(PolicyLossRegistry)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_rules_and_the_registry_say_the_same_of_an_estimator(name: str):
    facts, traits = ESTIMATORS[name], AdvantageEstimatorRegistry.traits(name)
    assert (facts.outcome, facts.needs_values, facts.needs_baseline) == (
        traits.outcome,
        traits.needs_values,
        traits.needs_baseline,
    )


@pytest.mark.parametrize("anchor", ["old", "rollout"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_rules_and_the_registry_say_the_same_of_a_loss(name: str, anchor: str):
    algorithm = AlgorithmConfig(policy_loss_type=name, cispo=CISPOConfig(cispo_anchor=anchor))
    facts, traits = loss_facts(algorithm), PolicyLossRegistry.traits(name)
    assert facts.correctable == traits.correctable
    assert facts.needs_rollout_logprobs == holds(traits.needs_rollout_logprobs, algorithm)
    assert facts.anchored == holds(traits.anchored, algorithm)
    assert not facts.corrects_itself and "loss_weights" in named_keywords(PolicyLossRegistry.get(name))
    assert facts.reads_head == ("topk" in named_keywords(PolicyLossRegistry.get(name)))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_built_in_estimator_passes(name: str):
    tokens = ["trainer.critic.model.path=a/b"] if name == "gae" else []
    validate_cfg(compose(f"trainer.algorithm.advantage_estimator={name}", *tokens))


@pytest.mark.parametrize("name", LOSSES)
def test_every_built_in_loss_passes(name: str):
    validate_cfg(compose(f"trainer.algorithm.policy_loss_type={name}"))


@pytest.fixture
def register():
    """Register users' functions for one test."""
    added = []

    def add(registry: Registry, name: str, decorator, function):
        if name in registry:
            registry.unregister(name)
        decorator(function)
        added.append((registry, name))

    yield add
    for registry, name in added:
        registry.unregister(name)
        registry.repopulate_registry()


CORRECTION = "trainer.algorithm.off_policy_correction"
OWN_LOSS = "trainer.algorithm.policy_loss_type=own"


def test_a_users_loss_that_needs_the_samplers_log_probs_cannot_do_without(register):
    register(
        PolicyLossRegistry,
        "own",
        register_policy_loss("own", needs_rollout_logprobs=lambda algorithm: algorithm.use_kl_loss),
        lambda log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs: log_probs.sum(),
    )
    without = "generator.sampling_params.logprobs=null"
    with pytest.raises(ConfigError, match=r"policy_loss_type=own needs .*sampling_params\.logprobs=null; set .*=1"):
        validate_cfg(compose(OWN_LOSS, without))
    validate_cfg(compose(OWN_LOSS, without, "trainer.algorithm.use_kl_loss=false"))


def test_a_users_loss_that_cannot_be_corrected_is_not(register):
    register(
        PolicyLossRegistry,
        "own",
        register_policy_loss("own", correctable=False),
        lambda log_probs, old_log_probs, advantages, config, *, loss_weights: log_probs.sum(),
    )
    with pytest.raises(ConfigError, match=r"policy_loss_type=own does not work with .*sequence_mask_metric=product"):
        validate_cfg(compose(OWN_LOSS, f"{CORRECTION}.sequence_mask_metric=product"))
    validate_cfg(compose(OWN_LOSS))


def test_a_users_loss_without_weights_is_warned_that_it_corrects_itself(register, caplog):
    register(
        PolicyLossRegistry,
        "own",
        register_policy_loss("own"),
        lambda log_probs, old_log_probs, advantages, config, loss_mask: log_probs.sum(),
    )
    validate_cfg(compose(OWN_LOSS))
    assert "loss_weights" not in caplog.text
    validate_cfg(compose(OWN_LOSS, f"{CORRECTION}.tis_ratio_type=token"))
    assert "policy_loss_type=own takes no loss_weights" in caplog.text
    assert "call apply_off_policy_correction inside the loss" in caplog.text


def test_the_traits_of_a_users_estimator_are_checked(register):
    register(
        AdvantageEstimatorRegistry,
        "own",
        register_advantage_estimator("own", outcome=False, needs_values=True),
        lambda **kwargs: None,
    )
    own = "trainer.algorithm.advantage_estimator=own"
    with pytest.raises(ConfigError, match=r"advantage_estimator=own needs a critic.*critic\.model\.path=null"):
        validate_cfg(compose(own))
    with pytest.raises(ConfigError, match=r"advantage_estimator=own .*step_wise_trajectories=true"):
        validate_cfg(compose(own, "trainer.critic.model.path=a/b", "generator.step_wise_trajectories=true"))
    validate_cfg(compose(own, "trainer.critic.model.path=a/b"))


def test_a_users_function_of_a_built_in_name_has_its_own_needs(register):
    token, alone = "trainer.algorithm.advantage_estimator=opo", "generator.n_samples_per_prompt=1"
    with pytest.raises(ConfigError, match=r"advantage_estimator=opo compares the rollouts"):
        validate_cfg(compose(token, alone))
    register(AdvantageEstimatorRegistry, "opo", register_advantage_estimator("opo"), lambda **kwargs: None)
    validate_cfg(compose(token, alone))


def test_wandb_needs_its_key_and_console_needs_none():
    check_loggers("console", environ={})
    check_loggers(["console", "wandb"], environ={"WANDB_API_KEY": "x"})
    check_loggers("wandb", environ={"WANDB_MODE": "offline"})
    for loggers in ("wandb", ["console", "wandb"]):
        with pytest.raises(ConfigError, match="WANDB_API_KEY"):
            check_loggers(loggers, environ={})
    with pytest.raises(ConfigError, match="did you mean tensorboard"):
        check_loggers("tensorbord", environ={})


@pytest.mark.parametrize("spec", [None, ModuleSpec("mlflow", None, is_package=True)])  # absent; a folder of that name
def test_a_tracker_needs_its_package(monkeypatch, spec):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    check_loggers("console")
    with pytest.raises(ConfigError, match=r"trainer\.logger=mlflow needs the package 'mlflow'.*pip install mlflow"):
        check_loggers(["console", "mlflow"])


def async_config(workers: int) -> SkyRLTrainConfig:
    return compose(
        "trainer.fully_async.enabled=true",
        "trainer.fully_async.max_staleness_steps=1",
        f"trainer.fully_async.num_parallel_generation_workers={workers}",
        "trainer.train_batch_size=8",
        "trainer.policy_mini_batch_size=4",
    )


@pytest.mark.parametrize(("workers", "message"), [(3, "between"), (9, "between"), (4, "not built"), (8, "not built")])
def test_workers_of_asynchronous_training_fit_batch_and_staleness(workers: int, message: str):
    with pytest.raises(ConfigError, match=message):
        validate_cfg(async_config(workers))


def test_validation_of_built_in_names_imports_no_torch():
    code = (
        "import sys; from skyrl.config.root import SkyRLTrainConfig; from skyrl.train.validate import validate_cfg;"
        "validate_cfg(SkyRLTrainConfig.from_cli_overrides([]));"
        "sys.exit(bool({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
