"""Settings whose feature does not exist yet. Building a feature deletes its line here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skyrl.config.base import BaseConfig
from skyrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """One key that is refused for some values.

    Example:
        >>> Unbuilt("trainer.mtp.enabled", bool, "draft heads")
    """

    key: str
    """Dotted path from the root."""
    is_asked: Callable[[Any], bool]
    """Whether a value asks for the feature."""
    feature: str
    """What is missing, for the message."""


def _is_set(value: object) -> bool:
    return value is not None


def _above(least: float) -> Callable[[Any], bool]:
    return lambda value: value > least


def _is(*names: str) -> Callable[[Any], bool]:
    return lambda value: value in names


_ROLES = ("policy", "ref", "critic")
_OPEN_SCHEDULES = ("reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay")
"""They need a metric, a least learning rate or a number of decay steps, and no key gives one."""
_ENGINE = "generator.inference_engine"

UNBUILT = (
    Unbuilt("trainer.strategy", _is("megatron"), "the Megatron backend"),
    *(Unbuilt(f"trainer.{role}.sequence_parallel_size", _above(1), "sequence parallelism") for role in _ROLES),
    *(Unbuilt(f"trainer.{role}.model.lora.rank", _above(0), "LoRA") for role in _ROLES),
    *(Unbuilt(f"trainer.{role}.model.fake_int4_qat.enabled", bool, "INT4 training") for role in _ROLES),
    *(Unbuilt(f"trainer.{role}.model.expert_mxfp8.enabled", bool, "MXFP8 experts") for role in _ROLES),
    *(Unbuilt(f"trainer.{role}.language_model_only", bool, "models with a vision tower") for role in _ROLES[:2]),
    *(
        Unbuilt(
            f"trainer.{role}.optimizer_config.offload_after_step", lambda on: not on, "an optimizer that stays on GPU"
        )
        for role in ("policy", "critic")
    ),
    *(
        Unbuilt(
            f"trainer.{role}.fsdp_config.mixed_precision.buffer_dtype", _is("bf16", "fp16"), "buffers in low precision"
        )
        for role in _ROLES
    ),
    *(
        Unbuilt(f"trainer.{role}.optimizer_config.scheduler", _is(*_OPEN_SCHEDULES), "schedules with further settings")
        for role in ("policy", "critic")
    ),
    Unbuilt("trainer.policy.torch_profiler_config.enable", bool, "torch profiler traces"),
    Unbuilt("trainer.policy.inference_only_init", bool, "a policy without an optimizer"),
    Unbuilt("trainer.policy.use_torch_compile", bool, "compilation of the log-prob step"),
    Unbuilt("trainer.max_tokens_per_microbatch", _above(0), "micro-batches by tokens"),
    Unbuilt("trainer.mtp.enabled", bool, "draft heads"),
    Unbuilt("trainer.fully_async.enabled", bool, "fully asynchronous training"),
    Unbuilt("trainer.fully_async.simulate_training", bool, "simulated training"),
    Unbuilt("trainer.algorithm.enable_sample_support_replay", bool, "sample-support replay"),
    Unbuilt("trainer.algorithm.score_centering.enabled", bool, "score centering"),
    Unbuilt("generator.step_wise_trajectories", bool, "step-wise trajectories"),
    Unbuilt("generator.merge_stepwise_output", bool, "merging of step-wise rows"),
    Unbuilt("generator.vision_language_generator", bool, "the vision-language generator"),
    Unbuilt("generator.chat_template.name_or_path", _is_set, "custom chat templates"),
    Unbuilt(f"{_ENGINE}.weight_sync_backend", _is("delta", "sharded_rdt"), "this weight transport"),
    Unbuilt(f"{_ENGINE}.fp8_weight_sync_mode", _is_set, "FP8 weight sync"),
    Unbuilt(f"{_ENGINE}.weight_proof", _is("full"), "the full weight proof"),
    Unbuilt(f"{_ENGINE}.offload_kv_for_weight_sync", bool, "offload of the key-value cache"),
    Unbuilt(f"{_ENGINE}.enable_return_routed_experts", bool, "routed experts"),
    Unbuilt(f"{_ENGINE}.enable_return_sample_support_set", bool, "sample-support replay"),
    Unbuilt(f"{_ENGINE}.enable_return_sample_support_logprobs", bool, "sample-support replay"),
    Unbuilt(f"{_ENGINE}.enable_pd", bool, "separate prefill engines"),
    Unbuilt(f"{_ENGINE}.language_model_only", bool, "models with a vision tower"),
)


def refuse_unbuilt(config: BaseConfig, prefix: str = "") -> None:
    """Raise ConfigError for the first key under ``prefix`` that asks for a feature which does not exist yet."""
    for entry in UNBUILT:
        if not entry.key.startswith(prefix):
            continue
        value = functools.reduce(getattr, entry.key.split("."), config)
        if entry.is_asked(value):
            shown = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(f"{entry.key}={shown}: not built yet ({entry.feature}); leave the key at its default")
