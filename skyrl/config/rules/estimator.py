"""Rules of the advantage estimator: what it needs of the rollouts and of the models."""

from __future__ import annotations

import logging

from skyrl.config.algorithm import AlgorithmConfig
from skyrl.config.generator import GeneratorConfig
from skyrl.config.rules.methods import EstimatorFacts
from skyrl.config.trainer import TrainerConfig
from skyrl.errors import ConfigError

logger = logging.getLogger(__name__)

_KEY = "trainer.algorithm"
_NAME = f"{_KEY}.advantage_estimator"
_SAMPLES = "generator.n_samples_per_prompt"


def check_estimator(
    algorithm: AlgorithmConfig, facts: EstimatorFacts, generator: GeneratorConfig, *, has_critic: bool
) -> None:
    """Check the chosen estimator against the rollouts it will get.

    Raises:
        ConfigError: it could not run, or it could only give advantages of 0.
    """
    name = algorithm.advantage_estimator
    if facts.needs_values and not has_critic:
        raise ConfigError(
            f"{_NAME}={name} needs a critic, but trainer.critic.model.path=null; set trainer.critic.model.path, or "
            "choose an estimator without one, such as grpo"
        )
    if generator.step_wise_trajectories and not facts.outcome:
        raise ConfigError(
            f"{_NAME}={name} reads the rewards of tokens and does not work with "
            "generator.step_wise_trajectories=true; use grpo or rloo"
        )
    _check_group(algorithm, facts, generator.n_samples_per_prompt)
    _check_rewards(algorithm, facts)
    if facts.needs_baseline:
        _check_baseline(name, generator)


def _check_group(algorithm: AlgorithmConfig, facts: EstimatorFacts, samples: int) -> None:
    name, k = algorithm.advantage_estimator, algorithm.pass_at_k
    if name == "pass_at_k" and not 2 <= k <= samples:
        raise ConfigError(
            f"{_KEY}.pass_at_k={k}: must lie between 2 and {_SAMPLES}={samples}; lower it or sample more rollouts"
        )
    if samples > 1:
        return
    if facts.zero_alone:
        raise ConfigError(
            f"{_NAME}={name} compares the rollouts of a prompt: with {_SAMPLES}=1 every advantage is 0 and nothing is "
            "learnt; set it to 2 or more, or use reinforce++, remax or gae"
        )
    if facts.bare_alone:
        logger.warning(
            "%s=%s compares the rollouts of a prompt: with %s=1 the bare reward is the advantage", _NAME, name, _SAMPLES
        )


def _check_rewards(algorithm: AlgorithmConfig, facts: EstimatorFacts) -> None:
    """Check that what the run adds to the rewards reaches the estimator."""
    name, length = algorithm.advantage_estimator, algorithm.overlong_buffer_len
    if algorithm.use_kl_in_reward and not facts.takes_kl:
        raise ConfigError(
            f"{_NAME}={name} cannot take {_KEY}.use_kl_in_reward=true, for it does not read the sum of the rewards; "
            f"set {_KEY}.use_kl_in_reward=false, and {_KEY}.use_kl_loss=true for a KL in the loss"
        )
    if length is not None and not facts.takes_punishment:
        raise ConfigError(
            f"{_NAME}={name} reads the named parts of the rewards, which {_KEY}.overlong_buffer_len={length} does not "
            "change; set it to null, or let the environment name the length as a part"
        )
    filters = {
        f"dynamic_sampling.type={algorithm.dynamic_sampling.type}": algorithm.dynamic_sampling.type is not None,
        "zero_variance_filter=true": algorithm.zero_variance_filter,
    }
    for setting, is_on in filters.items():
        if is_on and facts.learns_from_equal_sums:
            logger.warning(
                "%s=%s may learn from groups whose rollouts have equal sums of rewards, and %s.%s drops those",
                *(_NAME, name, _KEY, setting),
            )


def _check_baseline(name: str, generator: GeneratorConfig) -> None:
    sampling = generator.sampling_params
    for key, value in (("temperature", sampling.temperature), ("top_k", sampling.top_k)):
        greedy = 0 if key == "temperature" else 1
        if value == greedy:
            raise ConfigError(
                f"{_NAME}={name} subtracts the score of a greedy rollout: with generator.sampling_params.{key}={value} "
                "every rollout is greedy and every advantage 0; sample with temperature 1 and top_k -1"
            )
    if generator.step_wise_trajectories:
        raise ConfigError(f"{_NAME}={name} does not work with generator.step_wise_trajectories=true; use grpo or rloo")


def check_distillation(trainer: TrainerConfig, facts: EstimatorFacts) -> None:
    """Check `on_policy_distillation` against what else uses the reference model, which is the teacher.

    Raises:
        ConfigError: the rewards of the teacher would not be computed, or the teacher would not stay.
    """
    algorithm = trainer.algorithm
    key = f"{_KEY}.on_policy_distillation=true"
    if not algorithm.on_policy_distillation:
        return
    if not algorithm.use_kl_in_reward:
        raise ConfigError(
            f"{key} puts the teacher's log-probs into the rewards and needs {_KEY}.use_kl_in_reward=true, but it is "
            f"false; set it, and {_KEY}.use_kl_loss=false (+recipe=on_policy_distillation sets all three)"
        )
    if trainer.update_ref_every_epoch:
        raise ConfigError(
            f"{key} learns from trainer.ref.model.path, which trainer.update_ref_every_epoch=true would replace by "
            "the policy; set trainer.update_ref_every_epoch=false"
        )
    for name, value, off in (
        ("dynamic_sampling.type", algorithm.dynamic_sampling.type, "null"),
        ("zero_variance_filter", algorithm.zero_variance_filter, "false"),
        ("overlong_buffer_len", algorithm.overlong_buffer_len, "null"),
    ):
        if value:
            shown = str(value).lower()
            raise ConfigError(
                f"{key} does not learn from the environment's rewards, by which {_KEY}.{name}={shown} works; set "
                f"{_KEY}.{name}={off}"
            )
    if trainer.ref.model.path == trainer.policy.model.path:
        logger.warning(
            "%s, but trainer.ref.model.path=%s is the policy's own model: name the teacher there",
            key,
            trainer.ref.model.path,
        )
    if facts.outcome:
        logger.warning(
            "%s rewards each token, but %s=%s sums the rewards of a row; no_op keeps them apart",
            key,
            _NAME,
            algorithm.advantage_estimator,
        )
