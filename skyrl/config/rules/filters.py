"""Rules of what happens between rollouts and advantages: dynamic sampling and the punishment of long responses."""

from __future__ import annotations

import logging

from skyrl.config.algorithm import AlgorithmConfig, DynamicSamplingConfig, declares_overlong_again
from skyrl.config.generator import GeneratorConfig
from skyrl.config.rules.choices import require_at_least, require_choice, require_share
from skyrl.errors import ConfigError

logger = logging.getLogger(__name__)

_KEY = "trainer.algorithm"


def check_filters(algorithm: AlgorithmConfig, generator: GeneratorConfig) -> None:
    """Check how rollouts are chosen and their rewards shaped.

    Raises:
        ConfigError: a value is out of range or does not fit the rollouts.
    """
    _check_dynamic_sampling(algorithm.dynamic_sampling, generator.n_samples_per_prompt)
    _check_overlong(algorithm, generator)


def _check_dynamic_sampling(sampling: DynamicSamplingConfig, samples: int) -> None:
    key = f"{_KEY}.dynamic_sampling"
    require_choice(f"{key}.type", sampling.type, (None, "filter", "replace"))
    require_at_least(f"{key}.max_sample_batches", sampling.max_sample_batches, 1, unless=[-1])
    require_share(f"{key}.min_replace_ratio", sampling.min_replace_ratio)
    if sampling.type is None:
        return
    if sampling.type == "replace" and sampling.min_replace_ratio == 1:
        raise ConfigError(
            f"{key}.min_replace_ratio=1: more good groups than there are prompts are never found, so no batch would "
            "be trained on; lower it, such as to 0.3"
        )
    if samples == 1:
        logger.warning(
            "%s.type=%s looks for groups whose rewards differ: with generator.n_samples_per_prompt=1 every group "
            "counts as good and it does nothing",
            key,
            sampling.type,
        )


def _check_overlong(algorithm: AlgorithmConfig, generator: GeneratorConfig) -> None:
    key, length = f"{_KEY}.overlong_buffer_len", algorithm.overlong_buffer_len
    require_at_least(f"{_KEY}.overlong_buffer_penalty_factor", algorithm.overlong_buffer_penalty_factor, 0)
    if length is None:
        return
    limit = generator.sampling_params.max_generate_length
    if length <= 0:
        raise ConfigError(f"{key}={length}: must be at least 1 token; null turns the punishment off")
    if limit is not None and length > limit:
        raise ConfigError(
            f"{key}={length}: must be at most generator.sampling_params.max_generate_length={limit}, before whose end "
            "the punishment begins; lower it or set it to null"
        )
    if generator.max_turns > 1 and not declares_overlong_again(algorithm):
        raise ConfigError(
            f"{key}={length} punishes by the length of a single response and does not work with "
            f"generator.max_turns={generator.max_turns}; set {key}=null or generator.max_turns=1"
        )
