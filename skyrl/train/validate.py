"""Checks of a whole config before anything starts. They raise, or warn about what runs but is hardly meant.

The section rules live in ``skyrl.config.rules``; here they run in order, and the names of estimators and losses
are looked up, which user code may have registered. Nothing here changes the config.
"""

from __future__ import annotations

import difflib
import logging
import sys
from typing import TYPE_CHECKING, Any

from skyrl.config.algorithm import AlgorithmConfig
from skyrl.config.root import SkyRLTrainConfig
from skyrl.config.rules.algorithm import check_algorithm, check_kl_horizon
from skyrl.config.rules.batches import check_batches, uses_critic
from skyrl.config.rules.correction import check_correction
from skyrl.config.rules.engine import check_engine, check_engine_urls, check_engine_with_trainer
from skyrl.config.rules.estimator import check_distillation, check_estimator
from skyrl.config.rules.filters import check_filters
from skyrl.config.rules.generator import check_environment, check_generator
from skyrl.config.rules.methods import ESTIMATORS, LOSSES, EstimatorFacts, LossFacts, loss_facts
from skyrl.config.rules.paths import check_data_files, check_model_paths, check_output_folders
from skyrl.config.rules.placement import check_placement
from skyrl.config.rules.sampler_support import check_score_centering, check_support_replay
from skyrl.config.rules.trainer import check_async, check_data, check_draft_heads, check_loggers, check_trainer
from skyrl.config.rules.unbuilt import refuse_unbuilt
from skyrl.errors import ConfigError

if TYPE_CHECKING:
    from skyrl.utils.registry import Registry


logger = logging.getLogger(__name__)


class UnknownNameError(ConfigError):
    """Nobody registered an estimator or a loss of this name."""


def validate_cfg(cfg: SkyRLTrainConfig, *, names_may_follow: bool = False) -> None:
    """Check a finalized training config.

    Args:
        cfg: The config.
        names_may_follow: The run's own code may still register its estimator or loss; `check_algorithm_names` is
            called again when it has.

    Raises:
        ConfigError: names the key, its value, what it needs and a way out.
    """
    check_trainer(cfg.trainer)
    check_data(cfg.data)
    _check_rollouts(cfg)
    check_draft_heads(cfg.trainer)
    check_algorithm_names(cfg, names_may_follow=names_may_follow)
    check_async(cfg.trainer)
    check_engine_with_trainer(cfg.generator.inference_engine, cfg.trainer)
    check_batches(cfg.trainer, cfg.generator.n_samples_per_prompt)
    check_placement(cfg.trainer, cfg.generator.inference_engine)
    refuse_unbuilt(cfg)
    check_loggers(cfg.trainer.logger)


def validate_generator_cfg(cfg: SkyRLTrainConfig) -> None:
    """Check what rollouts alone need: generator, engines and environments.

    Raises:
        ConfigError: names the key, its value, what it needs and a way out.
    """
    _check_rollouts(cfg)
    refuse_unbuilt(cfg, prefix="generator.")


def _check_rollouts(cfg: SkyRLTrainConfig) -> None:
    check_generator(cfg.generator, max_prompt_length=cfg.trainer.max_prompt_length)
    check_engine(cfg.generator.inference_engine)
    check_engine_urls(cfg.generator.inference_engine, colocate_all=cfg.trainer.placement.colocate_all)
    check_environment(cfg.environment)


def validate_paths(cfg: SkyRLTrainConfig) -> None:
    """Check that data files and models exist and that output folders can be written.

    Raises:
        DatasetError: a data file does not exist.
        ModelLoadError: a model path does not exist or holds no model.
        ConfigError: a folder cannot be written.
    """
    check_data_files(cfg.data, evaluate=cfg.trainer.eval_interval > 0 or cfg.trainer.eval_before_train)
    check_model_paths(cfg.trainer)
    check_output_folders(cfg.trainer)


def validate_run(cfg: SkyRLTrainConfig, *, names_may_follow: bool = False) -> None:
    """Check the settings of a training run and the files and folders that they name.

    Raises:
        ConfigError, DatasetError, ModelLoadError: as `validate_cfg` and `validate_paths` do.
    """
    validate_cfg(cfg, names_may_follow=names_may_follow)
    validate_paths(cfg)


def check_algorithm_names(cfg: SkyRLTrainConfig, *, names_may_follow: bool = False) -> None:
    """Check the learning rule by itself, then against the rollouts and models that it gets.

    Raises:
        ConfigError: A value is out of range or contradicts another, or nobody registered an estimator or a loss
            of that name; with ``names_may_follow`` an unknown name is a warning.
    """
    algorithm, generator = cfg.trainer.algorithm, cfg.generator
    check_algorithm(algorithm, step_wise=generator.step_wise_trajectories)
    check_kl_horizon(algorithm, cfg.trainer.train_batch_size * generator.n_samples_per_prompt)
    try:
        estimator, loss = _estimator_facts(algorithm.advantage_estimator), _loss_facts(algorithm)
    except UnknownNameError as error:
        if not names_may_follow:
            raise
        logger.warning("%s (the run ends before it starts servers unless its own code registers that name)", error)
        return
    check_estimator(algorithm, estimator, generator, has_critic=uses_critic(cfg.trainer))
    check_correction(algorithm, loss, logprobs=generator.sampling_params.logprobs)
    check_filters(algorithm, generator)
    check_support_replay(algorithm, generator)
    check_score_centering(algorithm, loss, generator)
    check_distillation(cfg.trainer, estimator)


def _estimator_facts(name: str) -> EstimatorFacts:
    """Say what an estimator needs; the registry, which imports torch, is asked only about users' functions.

    Raises:
        ConfigError: nobody registered the name.
    """
    if name in ESTIMATORS and "skyrl.algorithms.advantages" not in sys.modules:
        return ESTIMATORS[name]
    from skyrl.algorithms.advantages import AdvantageEstimatorRegistry

    _require_registered("trainer.algorithm.advantage_estimator", name, AdvantageEstimatorRegistry)
    if name in ESTIMATORS and AdvantageEstimatorRegistry.is_built_in(name):
        return ESTIMATORS[name]
    traits = AdvantageEstimatorRegistry.traits(name)
    return EstimatorFacts(
        outcome=traits.outcome, needs_values=traits.needs_values, needs_baseline=traits.needs_baseline
    )


def _loss_facts(algorithm: AlgorithmConfig) -> LossFacts:
    """Say what a loss needs, as `_estimator_facts` does."""
    name = algorithm.policy_loss_type
    if name in LOSSES and "skyrl.algorithms.policy_losses" not in sys.modules:
        return loss_facts(algorithm)
    from skyrl.algorithms.policy_losses.registry import PolicyLossRegistry, holds
    from skyrl.algorithms.signatures import named_keywords

    _require_registered("trainer.algorithm.policy_loss_type", name, PolicyLossRegistry)
    if name in LOSSES and PolicyLossRegistry.is_built_in(name):
        return loss_facts(algorithm)
    traits, keywords = PolicyLossRegistry.traits(name), named_keywords(PolicyLossRegistry.get(name))
    return LossFacts(
        needs_rollout_logprobs=holds(traits.needs_rollout_logprobs, algorithm),
        correctable=traits.correctable,
        anchored=holds(traits.anchored, algorithm),
        corrects_itself="loss_weights" not in keywords,
        reads_head="topk" in keywords,
    )


def _require_registered(key: str, name: str, registry: Registry[Any, Any]) -> None:
    known = registry.list_available()
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=1)
    advice = f"; did you mean {close[0]}?" if close else ""
    raise UnknownNameError(
        f"{key}={name}: must be one of {', '.join(known)}, or a name that the run's own code registers{advice}"
    )
