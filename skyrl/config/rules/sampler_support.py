"""Rules of what the trainer takes over from truncated sampling: sample-support replay and score centering."""

from __future__ import annotations

import logging

from skyrl.config.algorithm import AlgorithmConfig
from skyrl.config.generator import GeneratorConfig, SamplingParams
from skyrl.config.rules.choices import require_choice
from skyrl.config.rules.methods import CENTERED_LOSSES, LossFacts
from skyrl.errors import ConfigError

logger = logging.getLogger(__name__)

_KEY = "trainer.algorithm"
_REPLAY = f"{_KEY}.enable_sample_support_replay=true"
_CENTERING = f"{_KEY}.score_centering"
_SAMPLING = "generator.sampling_params"
_SUPPORT = "generator.inference_engine.enable_return_sample_support_set"
_NO_CHANGE: dict[str, object] = {
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
}
"""Request fields that shift logits, and the values at which they do not."""


def check_support_replay(algorithm: AlgorithmConfig, generator: GeneratorConfig) -> None:
    """Check that the trainer can normalise over exactly the candidates that the sampler kept.

    Raises:
        ConfigError: the candidates are not returned or not bounded, or sampling changes logits in another way.
    """
    if not algorithm.enable_sample_support_replay:
        if generator.inference_engine.enable_return_sample_support_set and not algorithm.score_centering.enabled:
            logger.warning("%s=true, but nothing reads the candidates: see %s", _SUPPORT, _REPLAY)
        return
    if not generator.inference_engine.enable_return_sample_support_set:
        raise ConfigError(f"{_REPLAY} reads the candidates that the sampler kept; set {_SUPPORT}=true")
    params = generator.sampling_params
    most = algorithm.sample_support_max_top_k
    if not 1 < params.top_k <= most:
        raise ConfigError(
            f"{_SAMPLING}.top_k={params.top_k}: {_REPLAY} needs a bounded number of candidates, from 2 to "
            f"{_KEY}.sample_support_max_top_k={most}"
        )
    if not params.temperature > 0:
        raise ConfigError(f"{_SAMPLING}.temperature={params.temperature}: {_REPLAY} needs a temperature above 0")
    if algorithm.temperature != params.temperature:
        raise ConfigError(
            f"{_KEY}.temperature={algorithm.temperature} must equal {_SAMPLING}.temperature={params.temperature} with "
            f"{_REPLAY}; leave {_KEY}.temperature unset to follow it"
        )
    _check_penalties(params)
    _check_generator(generator)


def _check_penalties(params: SamplingParams) -> None:
    extra = params.additional_kwargs or {}
    asked: dict[str, tuple[object, object]] = {f"{_SAMPLING}.repetition_penalty": (params.repetition_penalty, 1)}
    asked |= {f"{_SAMPLING}.additional_kwargs.{name}": (extra.get(name), none) for name, none in _NO_CHANGE.items()}
    for key, (value, no_change) in asked.items():
        if value not in (None, no_change):
            raise ConfigError(f"{key}={value} changes logits in a way that {_REPLAY} cannot follow; remove it")


def _check_generator(generator: GeneratorConfig) -> None:
    others = {
        "generator.batched=true": generator.batched,
        f"generator.chat_template.name_or_path={generator.chat_template.name_or_path}": (
            generator.chat_template.name_or_path is not None
        ),
        "generator.merge_stepwise_output=true": generator.merge_stepwise_output,
    }
    for other, is_on in others.items():
        if is_on:
            raise ConfigError(f"{_REPLAY} does not work with {other}; turn one of them off")


def check_score_centering(algorithm: AlgorithmConfig, facts: LossFacts, generator: GeneratorConfig) -> None:
    """Check that the loss can be centred and the engine returns what it takes.

    Args:
        algorithm: `trainer.algorithm`.
        facts: Of the chosen loss.
        generator: `generator`.

    Raises:
        ConfigError: a value is out of range or contradicts another.
    """
    centering, params = algorithm.score_centering, generator.sampling_params
    require_choice(f"{_CENTERING}.tail", centering.tail, ("proportional", "drop", "renormalize"))
    if not centering.enabled:
        return
    if not facts.reads_head:
        raise ConfigError(
            f"{_CENTERING}.enabled=true needs {_KEY}.policy_loss_type={' or '.join(CENTERED_LOSSES)}, not "
            f"{algorithm.policy_loss_type}"
        )
    if centering.top_k < 1:
        raise ConfigError(f"{_CENTERING}.top_k={centering.top_k}: must be at least 1, such as 20")
    if algorithm.off_policy_correction.tis_ratio_type is not None:
        raise ConfigError(
            f"{_CENTERING}.enabled=true does not work with {_KEY}.off_policy_correction.tis_ratio_type="
            f"{algorithm.off_policy_correction.tis_ratio_type}; set that to null (masks still work)"
        )
    if params.logprobs is None:
        raise ConfigError(f"{_CENTERING}.enabled=true needs {_SAMPLING}.logprobs=1, not null")
    _check_processed(generator, params)


def _check_processed(generator: GeneratorConfig, params: SamplingParams) -> None:
    """With truncated sampling the head must be that of the filtered distribution."""
    truncated = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    mode = (generator.inference_engine.engine_init_kwargs or {}).get("logprobs_mode", "processed_logprobs")
    if truncated and mode != "processed_logprobs":
        raise ConfigError(
            f"generator.inference_engine.engine_init_kwargs.logprobs_mode={mode}: {_CENTERING}.enabled=true with "
            "top_k, top_p or min_p needs processed_logprobs; remove the key"
        )
