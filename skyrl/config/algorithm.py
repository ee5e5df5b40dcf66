"""Settings of the learning rule (`trainer.algorithm`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyrl.config.base import BaseConfig


@dataclass
class KLCtrlConfig(BaseConfig):
    """Control of the KL coefficient in the reward (`trainer.algorithm.kl_ctrl`)."""

    type: str = "fixed"
    """``fixed``, or ``adaptive`` towards ``kl_target``; used only with ``use_kl_in_reward``."""
    kl_target: float = 0.1
    """KL per token, in nats, that the adaptive controller aims at."""
    horizon: int = 10000
    """Samples over which the adaptive controller acts; larger is slower."""


@dataclass
class SAPOConfig(BaseConfig):
    """The soft gate of the ``sapo`` loss (`trainer.algorithm.sapo`)."""

    tau_pos: float = 1.0
    """Gate temperature for positive advantages."""
    tau_neg: float = 1.05
    """Gate temperature for negative advantages."""


@dataclass
class ClipCovConfig(BaseConfig):
    """The ``clip_cov`` loss (`trainer.algorithm.clip_cov`)."""

    clip_ratio: float = 2e-4
    """Share of tokens whose gradient is cut."""
    clip_cov_lb: float = 1.0
    """Lower bound of the covariance of candidates."""
    clip_cov_ub: float = 5.0
    """Upper bound of the covariance of candidates."""


@dataclass
class KLCovConfig(BaseConfig):
    """The ``kl_cov`` loss (`trainer.algorithm.kl_cov`)."""

    kl_cov_frac: float = 0.2
    """Share of tokens, those of highest covariance, that get a KL penalty."""
    ppo_kl_coef: float = 1.0
    """Weight of that penalty."""


@dataclass
class CISPOConfig(BaseConfig):
    """The ``cispo`` loss (`trainer.algorithm.cispo`)."""

    cispo_eps_clip_low: float = 1.0
    """The ratio is clamped from below at 1 minus this."""
    cispo_eps_clip_high: float = 4.0
    """The ratio is clamped from above at 1 plus this."""
    cispo_anchor: str = "old"
    """Denominator of the ratio: ``old`` log-probs of the trainer, or those of the ``rollout``."""


@dataclass
class DPPOConfig(BaseConfig):
    """The ``dppo`` loss (`trainer.algorithm.dppo`)."""

    dppo_type: str = "binary_tv"
    """Divergence that bounds a token: ``binary_tv`` or ``binary_kl``."""
    delta_low: float = 0.2
    """Bound where the probability falls."""
    delta_high: float = 0.2
    """Bound where the probability rises."""


@dataclass
class DynamicSamplingConfig(BaseConfig):
    """Sampling until groups teach something (`trainer.algorithm.dynamic_sampling`)."""

    type: str | None = None
    """None, ``filter`` (sample on until the batch is full) or ``replace`` (repeat good groups)."""
    max_sample_batches: int = 30
    """Batches sampled for one step before giving up; -1 means no limit."""
    min_replace_ratio: float = 0.3
    """Least share of good groups for ``replace``."""


@dataclass
class OffPolicyCorrectionConfig(BaseConfig):
    """Correction for the gap between sampler and trainer (`trainer.algorithm.off_policy_correction`)."""

    tis_ratio_type: str | None = None
    """Truncated importance sampling: None, ``token`` or ``sequence``."""
    token_tis_ratio_clip_high: float = 2.0
    """Highest weight of a token."""
    sequence_tis_ratio_clip_high: float = 5.0
    """Highest weight of a sequence."""
    sequence_mask_metric: str | None = None
    """Ratio by which sequences are dropped: None, ``product`` or ``geometric`` mean."""
    geo_mask_high: float = 1.01
    """Highest geometric mean that is kept."""
    geo_mask_low: float = 0.99
    """Lowest geometric mean that is kept."""
    product_mask_high: float = 2.0
    """Highest product that is kept."""
    product_mask_low: float = 0.5
    """Lowest product that is kept."""
    outlier_token_is_threshold_low: float | None = None
    """A sequence with a token ratio below this is dropped; None means no bound."""
    outlier_token_is_threshold_high: float | None = None
    """A sequence with a token ratio above this is dropped; None means no bound."""
    token_mask_is_threshold_low: float | None = None
    """A token with a ratio below this is dropped; set both bounds or none."""
    token_mask_is_threshold_high: float | None = None
    """A token with a ratio above this is dropped; set both bounds or none."""


@dataclass
class ScoreCenteringConfig(BaseConfig):
    """Subtracting the score that the sampler expects (`trainer.algorithm.score_centering`)."""

    enabled: bool = False
    """Centre the score; the engine then returns the head of its distribution."""
    top_k: int = 20
    """Tokens of that head."""
    tail: str = "proportional"
    """Mass outside the head: ``proportional``, ``drop`` or ``renormalize``."""


@dataclass
class AlgorithmConfig(BaseConfig):
    """Advantages, losses and their corrections (`trainer.algorithm`)."""

    advantage_estimator: str = "grpo"
    """Name of an advantage estimator, built in or registered."""
    pass_at_k: int = 4
    """Group size k of the estimator ``pass_at_k``, from 2 to ``n_samples_per_prompt``."""
    reward_weights: dict[str, Any] | None = field(default_factory=dict)
    """Weight of each named reward for the estimator ``gdpo``; a missing name has weight 1."""
    overlong_buffer_len: int | None = None
    """Tokens before the length limit in which a response is punished more and more; None turns it off."""
    overlong_buffer_penalty_factor: float = 1.0
    """Penalty at the length limit."""
    kl_ctrl: KLCtrlConfig = field(default_factory=KLCtrlConfig)
    """Control of the KL coefficient in the reward."""
    kl_estimator_type: str = "k3"
    """Estimate of the KL to the reference: ``k1``, ``k2``, ``k3`` or ``abs``."""
    use_kl_in_reward: bool = False
    """Subtract the KL from the reward; not together with ``use_kl_loss``."""
    use_kl_loss: bool = True
    """Add the KL to the loss."""
    kl_loss_coef: float = 0.001
    """Weight of the KL in the loss, or the first one in the reward."""
    use_entropy_loss: bool = False
    """Reward entropy in the loss."""
    entropy_loss_coef: float = 0.01
    """Weight of the entropy."""
    temperature: float | None = None
    """Divisor of the logits in the trainer; None means the sampling temperature of training."""
    advantage_batch_normalize: bool = False
    """Whiten advantages over the training batch."""
    value_head_prefix: str = "value_head"
    """Attribute name of the critic's head."""
    policy_loss_type: str = "regular"
    """Name of a policy loss, built in or registered."""
    loss_reduction: str = "token_mean"
    """Weighting of tokens: ``token_mean``, ``sequence_mean``, ``seq_mean_token_sum_norm``, ``prompt_mean`` or
    ``token_mean_legacy``."""
    max_seq_len: int | None = None
    """Tokens by which ``seq_mean_token_sum_norm`` divides; required there."""
    grpo_norm_by_std: bool = True
    """Divide group-relative advantages by the group's standard deviation."""
    zero_variance_filter: bool = False
    """Keep groups without a spread of rewards out of the loss."""
    zero_variance_filter_tol: float = 1e-6
    """A spread up to this counts as none."""
    lambd: float = 1.0
    """Lambda of GAE."""
    gamma: float = 1.0
    """Discount per token of ``gae`` and ``reinforce++``, per turn of ``turn_level``."""
    eps_clip_low: float = 0.2
    """The ratio is clipped from below at 1 minus this."""
    eps_clip_high: float = 0.2
    """The ratio is clipped from above at 1 plus this."""
    clip_ratio_c: float = 3.0
    """Bound of ``dual_clip`` for negative advantages."""
    value_clip: float | None = 0.2
    """Distance that a value may move from its old one; None means no bound."""
    use_tis: bool = False
    """Deprecated: use ``off_policy_correction.tis_ratio_type=token``."""
    tis_imp_ratio_cap: float = -1.0
    """Deprecated: use ``off_policy_correction.token_tis_ratio_clip_high``."""
    sapo: SAPOConfig = field(default_factory=SAPOConfig)
    """The ``sapo`` loss."""
    clip_cov: ClipCovConfig = field(default_factory=ClipCovConfig)
    """The ``clip_cov`` loss."""
    kl_cov: KLCovConfig = field(default_factory=KLCovConfig)
    """The ``kl_cov`` loss."""
    cispo: CISPOConfig = field(default_factory=CISPOConfig)
    """The ``cispo`` loss."""
    dppo: DPPOConfig = field(default_factory=DPPOConfig)
    """The ``dppo`` loss."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    """Sampling until groups teach something."""
    off_policy_correction: OffPolicyCorrectionConfig = field(default_factory=OffPolicyCorrectionConfig)
    """Correction for the gap between sampler and trainer."""
    on_policy_distillation: bool = False
    """Learn from a teacher instead of the environment: each token's reward is teacher minus old log-prob, where
    ``trainer.ref.model.path`` is the teacher; needs ``use_kl_in_reward``."""
    legacy_regularizer_reduction: bool = False
    """Average KL and entropy over each micro-batch instead of with the weights of the loss."""
    enable_sample_support_replay: bool = False
    """Normalise log-probs in training over the candidates that the sampler kept."""
    sample_support_max_top_k: int = 1024
    """Highest ``sampling_params.top_k`` with ``enable_sample_support_replay``; each generated token carries so many
    candidates."""
    score_centering: ScoreCenteringConfig = field(default_factory=ScoreCenteringConfig)
    """Subtracting the score that the sampler expects."""


def declares_overlong_again(algorithm: AlgorithmConfig) -> bool:
    """Whether a subclass has its own ``overlong_buffer_len``.

    Such a subclass punishes long responses in a trainer of its own (upstream's DAPO example), so the library does
    not, or it would count twice.
    """
    own = (cls for cls in type(algorithm).__mro__ if issubclass(cls, AlgorithmConfig) and cls is not AlgorithmConfig)
    return any("overlong_buffer_len" in vars(cls).get("__annotations__", {}) for cls in own)
