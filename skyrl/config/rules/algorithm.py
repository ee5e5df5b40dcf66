"""Rules of the learning rule (`trainer.algorithm`)."""

from __future__ import annotations

from skyrl.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig
from skyrl.config.derive import needs_rollout_logprobs
from skyrl.config.rules.choices import require_at_least, require_choice, require_positive, require_share
from skyrl.errors import ConfigError

LOSS_REDUCTIONS = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean", "token_mean_legacy")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs")
_KEY = "trainer.algorithm"


def check_algorithm(algorithm: AlgorithmConfig, *, has_critic: bool, step_wise: bool = False) -> None:
    """Check everything but the names of the estimator and the loss, which user code may register.

    Raises:
        ConfigError: a value is out of range or contradicts another.
    """
    if algorithm.use_kl_loss and algorithm.use_kl_in_reward:
        raise ConfigError(f"{_KEY}.use_kl_loss=true and {_KEY}.use_kl_in_reward=true exclude each other; turn one off")
    require_choice(f"{_KEY}.kl_estimator_type", algorithm.kl_estimator_type, KL_ESTIMATORS)
    require_choice(f"{_KEY}.kl_ctrl.type", algorithm.kl_ctrl.type, ("fixed", "adaptive"))
    require_positive(f"{_KEY}.kl_ctrl.horizon", algorithm.kl_ctrl.horizon)
    _check_estimator(algorithm, has_critic, step_wise)
    _check_reduction(algorithm, step_wise)
    _check_ranges(algorithm)
    require_choice(f"{_KEY}.dynamic_sampling.type", algorithm.dynamic_sampling.type, (None, "filter", "replace"))
    require_at_least(
        f"{_KEY}.dynamic_sampling.max_sample_batches", algorithm.dynamic_sampling.max_sample_batches, 1, unless=[-1]
    )
    require_choice(f"{_KEY}.cispo.cispo_anchor", algorithm.cispo.cispo_anchor, ("old", "rollout"))
    require_choice(f"{_KEY}.dppo.dppo_type", algorithm.dppo.dppo_type, ("binary_tv", "binary_kl"))
    require_choice(
        f"{_KEY}.score_centering.tail", algorithm.score_centering.tail, ("proportional", "drop", "renormalize")
    )
    _check_correction(algorithm)


def _check_estimator(algorithm: AlgorithmConfig, has_critic: bool, step_wise: bool) -> None:
    key, name = f"{_KEY}.advantage_estimator", algorithm.advantage_estimator
    if name == "gae" and not has_critic:
        raise ConfigError(f"{key}=gae needs a critic; set trainer.critic.model.path")
    if step_wise and name in {"gae", "reinforce++"}:
        raise ConfigError(f"{key}={name} does not work with generator.step_wise_trajectories=true; use grpo or rloo")


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
    for name in ("kl_loss_coef", "entropy_loss_coef", "eps_clip_low", "eps_clip_high", "value_clip"):
        require_at_least(f"{_KEY}.{name}", getattr(algorithm, name), 0)
    require_at_least(f"{_KEY}.zero_variance_filter_tol", algorithm.zero_variance_filter_tol, 0)
    require_share(f"{_KEY}.lambd", algorithm.lambd)
    require_share(f"{_KEY}.gamma", algorithm.gamma)
    if algorithm.clip_ratio_c <= 1:
        raise ConfigError(f"{_KEY}.clip_ratio_c={algorithm.clip_ratio_c}: must be above 1")


def _check_correction(algorithm: AlgorithmConfig) -> None:
    correction = algorithm.off_policy_correction
    key = f"{_KEY}.off_policy_correction"
    require_choice(f"{key}.tis_ratio_type", correction.tis_ratio_type, (None, "token", "sequence"))
    require_choice(f"{key}.sequence_mask_metric", correction.sequence_mask_metric, (None, "product", "geometric"))
    require_positive(f"{key}.token_tis_ratio_clip_high", correction.token_tis_ratio_clip_high)
    require_positive(f"{key}.sequence_tis_ratio_clip_high", correction.sequence_tis_ratio_clip_high)
    _require_interval(correction, "geo_mask_low", "geo_mask_high")
    _require_interval(correction, "product_mask_low", "product_mask_high")
    _require_interval(correction, "outlier_token_is_threshold_low", "outlier_token_is_threshold_high")
    _require_interval(correction, "token_mask_is_threshold_low", "token_mask_is_threshold_high")
    if (correction.token_mask_is_threshold_low is None) != (correction.token_mask_is_threshold_high is None):
        raise ConfigError(f"{key}: set both token_mask_is_threshold_low and token_mask_is_threshold_high, or neither")
    loss = algorithm.policy_loss_type
    if loss in {"clip_cov", "kl_cov"} and needs_rollout_logprobs(algorithm):
        raise ConfigError(f"{_KEY}.policy_loss_type={loss} does not work with {key}; turn one of them off")
    if loss == "cispo" and algorithm.cispo.cispo_anchor == "rollout" and correction.tis_ratio_type is not None:
        raise ConfigError(f"{_KEY}.cispo.cispo_anchor=rollout needs {key}.tis_ratio_type=null: it corrects already")


def _require_interval(correction: OffPolicyCorrectionConfig, low: str, high: str) -> None:
    key = f"{_KEY}.off_policy_correction"
    bottom, top = getattr(correction, low), getattr(correction, high)
    for name, bound in ((low, bottom), (high, top)):
        require_at_least(f"{key}.{name}", bound, 0, unless=[None])
    if bottom is not None and top is not None and bottom >= top:
        raise ConfigError(f"{key}.{low}={bottom} must be below {key}.{high}={top}")
