"""Rules of the learning rule (`trainer.algorithm`) by itself: values, ranges and choices.

What it needs of the rollouts is in ``estimator``, ``correction``, ``filters`` and ``sampler_support``.
"""

from __future__ import annotations

import math
from numbers import Real

from skyrl.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig
from skyrl.config.rules.choices import require_at_least, require_choice, require_positive, require_share
from skyrl.errors import ConfigError

LOSS_REDUCTIONS = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean", "token_mean_legacy")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs")
_KEY = "trainer.algorithm"


def check_algorithm(algorithm: AlgorithmConfig, *, step_wise: bool = False) -> None:
    """Check everything but the names of the estimator and the loss, which user code may register.

    Raises:
        ConfigError: a value is out of range or contradicts another.
    """
    if algorithm.use_kl_loss and algorithm.use_kl_in_reward:
        raise ConfigError(f"{_KEY}.use_kl_loss=true and {_KEY}.use_kl_in_reward=true exclude each other; turn one off")
    require_choice(f"{_KEY}.kl_estimator_type", algorithm.kl_estimator_type, KL_ESTIMATORS)
    require_choice(f"{_KEY}.kl_ctrl.type", algorithm.kl_ctrl.type, ("fixed", "adaptive"))
    require_positive(f"{_KEY}.kl_ctrl.kl_target", algorithm.kl_ctrl.kl_target)
    require_positive(f"{_KEY}.kl_ctrl.horizon", algorithm.kl_ctrl.horizon)
    _check_reduction(algorithm, step_wise)
    _check_ranges(algorithm)
    _check_losses(algorithm)
    _check_reward_weights(algorithm)
    _check_correction_ranges(algorithm.off_policy_correction)


def check_kl_horizon(algorithm: AlgorithmConfig, rows: int) -> None:
    """Check that an adaptive KL coefficient cannot fall to 0, from where it never rises.

    Args:
        algorithm: `trainer.algorithm`.
        rows: Rollouts of a step. The coefficient is multiplied by 1 - 0.2 * rows / horizon at the least.

    Raises:
        ConfigError: the horizon is too small for so many rows.
    """
    control = algorithm.kl_ctrl
    if algorithm.use_kl_in_reward and control.type == "adaptive" and control.horizon * 5 <= rows:
        raise ConfigError(
            f"{_KEY}.kl_ctrl.horizon={control.horizon}: must be above {rows // 5}, a fifth of the {rows} rollouts of a "
            f"step, or the KL coefficient could fall to 0 for good; set it to {max(10_000, rows)}"
        )


def _check_reduction(algorithm: AlgorithmConfig, step_wise: bool) -> None:
    key, name = f"{_KEY}.loss_reduction", algorithm.loss_reduction
    require_choice(key, name, LOSS_REDUCTIONS)
    if name == "seq_mean_token_sum_norm":
        if algorithm.max_seq_len is None:
            raise ConfigError(f"{key}={name} needs {_KEY}.max_seq_len, the number of tokens to divide by")
        require_positive(f"{_KEY}.max_seq_len", algorithm.max_seq_len)
    if name == "token_mean_legacy" and step_wise:
        raise ConfigError(f"{key}={name} does not work with generator.step_wise_trajectories=true; use token_mean")


def _check_ranges(algorithm: AlgorithmConfig) -> None:
    if algorithm.temperature is not None:
        require_positive(f"{_KEY}.temperature", algorithm.temperature)
    for name in ("kl_loss_coef", "entropy_loss_coef", "zero_variance_filter_tol"):
        require_at_least(f"{_KEY}.{name}", getattr(algorithm, name), 0)
    require_at_least(f"{_KEY}.value_clip", algorithm.value_clip, 0, unless=[None])
    require_share(f"{_KEY}.lambd", algorithm.lambd)
    require_share(f"{_KEY}.gamma", algorithm.gamma)


def _check_losses(algorithm: AlgorithmConfig) -> None:
    """Check the settings of every loss, the chosen one or not."""
    for name in (
        *("eps_clip_low", "eps_clip_high", "clip_cov.clip_cov_lb", "kl_cov.ppo_kl_coef"),
        *("cispo.cispo_eps_clip_low", "cispo.cispo_eps_clip_high", "dppo.delta_low", "dppo.delta_high"),
    ):
        *group, leaf = name.split(".")
        require_at_least(f"{_KEY}.{name}", getattr(getattr(algorithm, group[0]) if group else algorithm, leaf), 0)
    if not algorithm.clip_ratio_c > 1:
        raise ConfigError(f"{_KEY}.clip_ratio_c={algorithm.clip_ratio_c}: must be above 1, such as 3 or 10")
    require_positive(f"{_KEY}.sapo.tau_pos", algorithm.sapo.tau_pos)
    require_positive(f"{_KEY}.sapo.tau_neg", algorithm.sapo.tau_neg)
    require_share(f"{_KEY}.clip_cov.clip_ratio", algorithm.clip_cov.clip_ratio)
    require_share(f"{_KEY}.kl_cov.kl_cov_frac", algorithm.kl_cov.kl_cov_frac)
    lowest, highest = algorithm.clip_cov.clip_cov_lb, algorithm.clip_cov.clip_cov_ub
    if not lowest < highest:
        raise ConfigError(f"{_KEY}.clip_cov.clip_cov_lb={lowest} must be below {_KEY}.clip_cov.clip_cov_ub={highest}")
    require_choice(f"{_KEY}.cispo.cispo_anchor", algorithm.cispo.cispo_anchor, ("old", "rollout"))
    require_choice(f"{_KEY}.dppo.dppo_type", algorithm.dppo.dppo_type, ("binary_tv", "binary_kl"))


def _check_reward_weights(algorithm: AlgorithmConfig) -> None:
    for name, weight in (algorithm.reward_weights or {}).items():
        if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
            raise ConfigError(f"{_KEY}.reward_weights.{name}={weight}: must be a finite number, such as 0.5")


def _check_correction_ranges(correction: OffPolicyCorrectionConfig) -> None:
    key = f"{_KEY}.off_policy_correction"
    require_choice(f"{key}.tis_ratio_type", correction.tis_ratio_type, (None, "token", "sequence"))
    require_choice(f"{key}.sequence_mask_metric", correction.sequence_mask_metric, (None, "product", "geometric"))
    require_positive(f"{key}.token_tis_ratio_clip_high", correction.token_tis_ratio_clip_high)
    require_positive(f"{key}.sequence_tis_ratio_clip_high", correction.sequence_tis_ratio_clip_high)
    _require_interval(correction, "geo_mask_low", "geo_mask_high")
    _require_interval(correction, "product_mask_low", "product_mask_high")
    _require_interval(correction, "outlier_token_is_threshold_low", "outlier_token_is_threshold_high")
    _require_interval(correction, "token_mask_is_threshold_low", "token_mask_is_threshold_high")
    bounds = ("token_mask_is_threshold_low", "token_mask_is_threshold_high")
    missing = [name for name in bounds if getattr(correction, name) is None]
    if len(missing) == 1:
        raise ConfigError(f"{key}.{missing[0]}=null: set both {' and '.join(bounds)}, or neither")


def _require_interval(correction: OffPolicyCorrectionConfig, low: str, high: str) -> None:
    key = f"{_KEY}.off_policy_correction"
    bottom, top = getattr(correction, low), getattr(correction, high)
    for name, bound in ((low, bottom), (high, top)):
        require_at_least(f"{key}.{name}", bound, 0, unless=[None])
    if bottom is not None and top is not None and bottom >= top:
        raise ConfigError(f"{key}.{low}={bottom} must be below {key}.{high}={top}")
