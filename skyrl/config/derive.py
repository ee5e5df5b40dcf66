"""Settings that follow from other settings. Each function works in place and may run twice without a change."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import warnings

from skyrl.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig, ScoreCenteringConfig
from skyrl.config.data import DataConfig
from skyrl.config.generator import GeneratorConfig, default_eval_sampling_params
from skyrl.config.inference_engine import DeltaWeightSyncConfig, InferenceEngineConfig
from skyrl.config.megatron import DEFAULT_OPTIMIZER_KWARGS, DEFAULT_TRANSFORMER_KWARGS, MegatronConfig
from skyrl.config.roles import FSDPConfig, MixedPrecisionConfig, ModelConfig
from skyrl.config.trainer import TrainerConfig
from skyrl.env_vars import SKYRL_DISABLE_SPEC
from skyrl.utils.storage import is_cloud_path

logger = logging.getLogger(__name__)

_ENGINE_MAX_LOGPROBS = 20
"""Log-probs per token that vLLM returns at most unless it is told otherwise."""

TRAIN_SOURCES = {
    "trainer.ref.model.path": "trainer.policy.model.path",
    "trainer.algorithm.temperature": "generator.sampling_params.temperature",
    "generator.max_input_length": "trainer.max_prompt_length",
    "generator.eval_sampling_params.max_generate_length": "generator.sampling_params.max_generate_length",
}
"""Keys of an RL run that take another key's value unless they are set."""


def derive_data(data: DataConfig) -> None:
    """Expand ``~`` in file names and choose the number of loader processes."""
    data.train_data = [os.path.expanduser(path) for path in data.train_data]
    data.val_data = [os.path.expanduser(path) for path in data.val_data or []]
    if data.dataloader.num_workers is None:
        data.dataloader.num_workers = 8


def derive_trainer(trainer: TrainerConfig) -> None:
    """Resolve old names, null groups and paths of the training loop."""
    if trainer.strategy == "fsdp2":
        warnings.warn("trainer.strategy=fsdp2 is deprecated; use fsdp", DeprecationWarning, stacklevel=2)
        trainer.strategy = "fsdp"
    if trainer.resume_mode is None or trainer.resume_mode.lower() in {"none", "null"}:
        trainer.resume_mode = "none"
    if trainer.log_example_interval > 0 and trainer.print_example_interval != trainer.log_example_interval:
        trainer.print_example_interval = trainer.log_example_interval
        logger.info("trainer.log_example_interval sets trainer.print_example_interval=%d", trainer.log_example_interval)
    for role in (trainer.policy, trainer.ref, trainer.critic):
        _derive_fsdp(role.fsdp_config)
        _derive_model(role.model)
        role.model_config_kwargs = role.model_config_kwargs or {}
    for megatron in (trainer.policy.megatron_config, trainer.ref.megatron_config):
        _derive_megatron(megatron)
    _derive_algorithm(trainer.algorithm)
    _derive_paths(trainer)


def _derive_fsdp(fsdp: FSDPConfig) -> None:
    fsdp.mixed_precision = fsdp.mixed_precision or MixedPrecisionConfig()
    fsdp.wrap_policy = fsdp.wrap_policy or {}


def _derive_model(model: ModelConfig) -> None:
    if model.path is not None:
        model.path = os.path.expanduser(model.path)


def _derive_megatron(megatron: MegatronConfig) -> None:
    if megatron.optimizer_config_kwargs is None:
        megatron.optimizer_config_kwargs = dict(DEFAULT_OPTIMIZER_KWARGS)
    if megatron.transformer_config_kwargs is None:
        megatron.transformer_config_kwargs = dict(DEFAULT_TRANSFORMER_KWARGS)
    megatron.model_config_kwargs = megatron.model_config_kwargs or {}


def _derive_algorithm(algorithm: AlgorithmConfig) -> None:
    algorithm.reward_weights = algorithm.reward_weights or {}
    if algorithm.use_tis:
        warnings.warn(
            "trainer.algorithm.use_tis is deprecated; use trainer.algorithm.off_policy_correction.tis_ratio_type=token",
            DeprecationWarning,
            stacklevel=2,
        )
        correction = algorithm.off_policy_correction
        correction.tis_ratio_type = "token"
        if algorithm.tis_imp_ratio_cap > 0:
            correction.token_tis_ratio_clip_high = algorithm.tis_imp_ratio_cap
        algorithm.use_tis = False


def _derive_paths(trainer: TrainerConfig) -> None:
    for name in ("ckpt_path", "export_path", "log_path", "resume_path", "run_dir"):
        path: str | None = getattr(trainer, name)
        if path is not None:
            setattr(trainer, name, os.path.expanduser(path))
    if not trainer.run_dir:
        parent = trainer.log_path if is_cloud_path(trainer.export_path) else trainer.export_path
        trainer.run_dir = os.path.join(parent, "runs", trainer.run_name)


def derive_generator(generator: GeneratorConfig) -> None:
    """Resolve old names and null groups of rollouts and engines."""
    engine = generator.inference_engine
    if engine.weight_sync_backend == "rdt":
        engine.weight_sync_backend = "sharded_rdt"
    if generator.eval_sampling_params is None:
        generator.eval_sampling_params = default_eval_sampling_params()
    for params in (generator.sampling_params, generator.eval_sampling_params):
        params.additional_kwargs = params.additional_kwargs or {}
    generator.chat_template_kwargs = generator.chat_template_kwargs or {}
    engine.engine_init_kwargs = engine.engine_init_kwargs or {}
    engine.router_init_kwargs = engine.router_init_kwargs or {}
    engine.prefill_init_kwargs = engine.prefill_init_kwargs or {}
    engine.decode_init_kwargs = engine.decode_init_kwargs or {}
    engine.speculative_config = engine.speculative_config or {}
    engine.delta_weight_sync = engine.delta_weight_sync or DeltaWeightSyncConfig()
    _derive_delta_folders(engine.delta_weight_sync)


def _derive_delta_folders(delta: DeltaWeightSyncConfig) -> None:
    if delta.sync_dir is None:
        return
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", delta.sync_dir).strip("_")
    root = tempfile.gettempdir()
    if delta.local_checkpoint_dir is None:
        delta.local_checkpoint_dir = os.path.join(root, "skyrl_delta_checkpoints", name)
    if delta.publish_staging_dir is None:
        delta.publish_staging_dir = os.path.join(root, "skyrl_delta_publish_staging", name)


def derive_across(trainer: TrainerConfig, generator: GeneratorConfig) -> None:
    """Set what one group takes from another: draft heads, adapters and the log-probs that a correction needs."""
    _derive_draft_heads(trainer, generator)
    _derive_score_centering(trainer.algorithm.score_centering, generator.inference_engine)
    engine = generator.inference_engine
    if engine.enforce_eager and syncs_adapters(trainer):
        logger.warning(
            "generator.inference_engine.enforce_eager=true is slow with adapters in the engine: set to false"
        )
        engine.enforce_eager = False
    if generator.sampling_params.logprobs is None and needs_rollout_logprobs(trainer.algorithm):
        logger.warning("generator.sampling_params.logprobs=null: set to 1, because the loss needs rollout log-probs")
        generator.sampling_params.logprobs = 1


def _derive_draft_heads(trainer: TrainerConfig, generator: GeneratorConfig) -> None:
    megatron, mtp = trainer.policy.megatron_config, trainer.mtp
    if not mtp.enabled:
        megatron.mtp_num_layers = 0
        return
    megatron.mtp_loss_weight = mtp.loss_weight
    if not SKYRL_DISABLE_SPEC and not generator.inference_engine.speculative_config:
        generator.inference_engine.speculative_config = {
            "method": "mtp",
            "num_speculative_tokens": mtp.num_speculative_tokens,
        }


def _derive_score_centering(centering: ScoreCenteringConfig, engine: InferenceEngineConfig) -> None:
    """Ask the engine for the head of its distribution, as wide as score centering reads it."""
    if not centering.enabled:
        return
    engine.enable_return_sample_support_set = engine.enable_return_sample_support_logprobs = True
    kwargs = engine.engine_init_kwargs = engine.engine_init_kwargs or {}
    if centering.top_k > kwargs.get("max_logprobs", _ENGINE_MAX_LOGPROBS):
        kwargs["max_logprobs"] = centering.top_k


def syncs_adapters(trainer: TrainerConfig) -> bool:
    """Whether weight sync sends LoRA adapters instead of whole weights."""
    merged = trainer.strategy == "megatron" and trainer.policy.megatron_config.lora_config.merge_lora
    return trainer.policy.model.lora.rank > 0 and not merged


def corrects_off_policy(correction: OffPolicyCorrectionConfig) -> bool:
    """Whether any off-policy correction is configured, of whichever of the four kinds."""
    values = (
        *(correction.tis_ratio_type, correction.sequence_mask_metric),
        *(correction.outlier_token_is_threshold_low, correction.outlier_token_is_threshold_high),
        *(correction.token_mask_is_threshold_low, correction.token_mask_is_threshold_high),
    )
    return any(value is not None for value in values)


def needs_rollout_logprobs(algorithm: AlgorithmConfig) -> bool:
    """Whether the loss compares the trainer's log-probs with the sampler's."""
    return (
        algorithm.policy_loss_type in {"dppo", "rollout_is"}
        or (algorithm.policy_loss_type == "cispo" and algorithm.cispo.cispo_anchor == "rollout")
        or algorithm.score_centering.enabled
        or corrects_off_policy(algorithm.off_policy_correction)
    )
