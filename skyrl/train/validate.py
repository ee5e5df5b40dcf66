"""Checks of a whole config before anything starts. They raise and change nothing.

The section rules live in ``skyrl.config.rules``; here they run in order, and the names of estimators and losses
are looked up, which user code may have registered.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

from skyrl.config.root import SkyRLTrainConfig
from skyrl.config.rules.algorithm import check_algorithm
from skyrl.config.rules.batches import check_batches, uses_critic
from skyrl.config.rules.engine import check_engine, check_engine_urls, check_engine_with_trainer
from skyrl.config.rules.generator import check_environment, check_generator
from skyrl.config.rules.paths import check_data_files, check_model_paths, check_output_folders
from skyrl.config.rules.placement import check_placement
from skyrl.config.rules.trainer import check_async, check_data, check_draft_heads, check_loggers, check_trainer
from skyrl.config.rules.unbuilt import refuse_unbuilt
from skyrl.errors import ConfigError

_BUILT_ESTIMATORS = ("grpo", "gae", "rloo", "reinforce++")
_BUILT_LOSSES = ("regular",)
_LATER_ESTIMATORS = ("maxrl", "opo", "remax", "gpg", "pass_at_k", "liteppo", "gdpo", "turn_level")
_LATER_LOSSES = (
    *("dual_clip", "gspo", "clip_cov", "kl_cov", "cispo", "sapo", "rollout_is", "dppo", "cross_entropy"),
    *("importance_sampling", "reinforce"),
)


def validate_cfg(cfg: SkyRLTrainConfig) -> None:
    """Check a finalized training config.

    Raises:
        ConfigError: names the key, its value, what it needs and a way out.
    """
    check_trainer(cfg.trainer)
    check_data(cfg.data)
    _check_rollouts(cfg)
    check_draft_heads(cfg.trainer)
    check_algorithm(
        cfg.trainer.algorithm,
        has_critic=uses_critic(cfg.trainer),
        step_wise=cfg.generator.step_wise_trajectories,
    )
    check_async(cfg.trainer)
    check_engine_with_trainer(cfg.generator.inference_engine, cfg.trainer)
    check_batches(cfg.trainer, cfg.generator.n_samples_per_prompt)
    check_placement(cfg.trainer, cfg.generator.inference_engine)
    refuse_unbuilt(cfg)
    check_loggers(cfg.trainer.logger)
    _check_registered_names(cfg.trainer.algorithm.advantage_estimator, cfg.trainer.algorithm.policy_loss_type)


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


def validate_run(cfg: SkyRLTrainConfig) -> None:
    """Check the settings of a training run and the files and folders that they name.

    Raises:
        ConfigError, DatasetError, ModelLoadError: as `validate_cfg` and `validate_paths` do.
    """
    validate_cfg(cfg)
    validate_paths(cfg)


def _check_registered_names(estimator: str, loss: str) -> None:
    """Ask the registries only about names that are not built in: they import torch."""
    if estimator not in _BUILT_ESTIMATORS:
        from skyrl.algorithms.advantages import AdvantageEstimatorRegistry

        known = AdvantageEstimatorRegistry.list_available()
        _require_registered("trainer.algorithm.advantage_estimator", estimator, known, _LATER_ESTIMATORS)
    if loss not in _BUILT_LOSSES:
        from skyrl.algorithms.policy_losses import PolicyLossRegistry

        known = PolicyLossRegistry.list_available()
        _require_registered("trainer.algorithm.policy_loss_type", loss, known, _LATER_LOSSES)


def _require_registered(key: str, name: str, known: Collection[str], later: Collection[str]) -> None:
    if name in known:
        return
    if name in later:
        raise ConfigError(f"{key}={name} is not built yet; use one of {', '.join(sorted(known))}")
    close = difflib.get_close_matches(name, list(known), n=1)
    advice = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(f"{key}={name}: must be one of {', '.join(sorted(known))}, or a name that you register{advice}")
