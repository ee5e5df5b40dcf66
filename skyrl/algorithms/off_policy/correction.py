"""All configured corrections in their order, as one factor for each token's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from skyrl.algorithms.mean import Mean, MetricValue
from skyrl.algorithms.off_policy.outlier_mask import compute_outlier_token_mask
from skyrl.algorithms.off_policy.ratio import log_ratio, ratio_metrics, trained_tokens
from skyrl.algorithms.off_policy.sequence_mask import compute_sequence_mask
from skyrl.algorithms.off_policy.tis import compute_tis_ratio
from skyrl.algorithms.off_policy.token_mask import compute_token_mask
from skyrl.config.algorithm import OffPolicyCorrectionConfig
from skyrl.config.derive import corrects_off_policy as is_active

WEIGHT = "correction_weight"
"""Stem of the moments of the factors; the effective sample size is their squared mean over their mean square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What a correction does to one micro-batch, without gradient."""

    factors: Float[Tensor, "batch response"]
    """Multiplies each token's loss; 0 drops the token."""
    metrics: dict[str, MetricValue]
    """Diagnostics, by the names of `loss_metrics/`."""


def compute_correction(
    old_log_probs: Float[Tensor, "batch response"],
    rollout_logprobs: Float[Tensor, "batch response"],
    loss_mask: Shaped[Tensor, "batch response"] | None,
    config: OffPolicyCorrectionConfig,
) -> Correction:
    """Compute what the configured corrections do, as factors of the token losses.

    The order is: outlier mask, token mask, importance weights, sequence mask; each sees only the tokens that the
    ones before it kept. The weights of the loss reduction stay those of all trained tokens.

    Raises:
        ConfigError: A type has no such name, or one bound of the token mask is missing.
        ValueError: The tensors differ in shape.
    """
    trained = trained_tokens(old_log_probs, loss_mask)
    if not is_active(config):
        dtype = torch.promote_types(old_log_probs.dtype, torch.float32)
        return Correction(factors=trained.to(dtype), metrics={})
    weights, kept, metrics = _run_steps(old_log_probs, rollout_logprobs, trained, config)
    factors = kept.to(torch.float32) if weights is None else torch.where(kept, weights, 0.0)
    return Correction(factors=factors, metrics=metrics | _weight_metrics(factors, kept, trained))


def compute_off_policy_correction(
    old_log_probs: Float[Tensor, "batch response"],
    rollout_logprobs: Float[Tensor, "batch response"],
    loss_mask: Shaped[Tensor, "batch response"],
    off_policy_correction: OffPolicyCorrectionConfig,
) -> tuple[Float[Tensor, "batch width"] | None, dict[str, MetricValue], Shaped[Tensor, "batch response"]]:
    """Compute importance weights and a new loss mask: upstream's form of `compute_correction`, which see.

    Returns:
        The weights of tokens or rows (None without importance sampling), metrics, and the loss mask with zeros
        for what is dropped.
    """
    if not is_active(off_policy_correction):
        return None, {}, loss_mask
    trained = trained_tokens(old_log_probs, loss_mask)
    weights, kept, metrics = _run_steps(old_log_probs, rollout_logprobs, trained, off_policy_correction)
    return weights, metrics, torch.where(kept, loss_mask, torch.zeros_like(loss_mask))


def apply_off_policy_correction(
    loss: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    rollout_logprobs: Float[Tensor, "batch response"] | None,
    loss_mask: Shaped[Tensor, "batch response"],
    off_policy_correction: OffPolicyCorrectionConfig,
) -> tuple[Float[Tensor, "batch response"], Shaped[Tensor, "batch response"], dict[str, MetricValue]]:
    """Correct token losses; for custom losses that take no `loss_weights`, as upstream's.

    Returns:
        The losses times their weights, 0 where nothing trains; the mask without what is dropped; metrics. Without
        a correction the first two come back as they are, and there are no metrics.

    Raises:
        ValueError: A correction is configured but `rollout_logprobs` is None, or shapes differ.
        ConfigError: As `compute_correction`.
    """
    if not is_active(off_policy_correction):
        return loss, loss_mask, {}
    if rollout_logprobs is None:
        raise ValueError("an off-policy correction needs rollout_logprobs; set generator.sampling_params.logprobs=1")
    weights, metrics, mask = compute_off_policy_correction(
        old_log_probs, rollout_logprobs, loss_mask, off_policy_correction
    )
    corrected = loss if weights is None else loss * weights
    return torch.where(mask != 0, corrected, 0.0), mask, metrics


def _run_steps(
    old_log_probs: Tensor, rollout_logprobs: Tensor, trained: Tensor, config: OffPolicyCorrectionConfig
) -> tuple[Tensor | None, Bool[Tensor, "batch response"], dict[str, MetricValue]]:
    """Return importance weights, the trained tokens that stay, and metrics."""
    metrics = ratio_metrics(log_ratio(old_log_probs, rollout_logprobs, trained), trained)
    kept, weights = trained, None
    if config.outlier_token_is_threshold_low is not None or config.outlier_token_is_threshold_high is not None:
        mask, found = compute_outlier_token_mask(old_log_probs, rollout_logprobs, kept, config)
        kept, metrics = kept & mask.bool(), metrics | found
    if config.token_mask_is_threshold_low is not None or config.token_mask_is_threshold_high is not None:
        mask, found = compute_token_mask(old_log_probs, rollout_logprobs, kept, config)
        kept, metrics = kept & mask.bool(), metrics | found
    if config.tis_ratio_type is not None:
        weights, found = compute_tis_ratio(old_log_probs, rollout_logprobs, kept, config.tis_ratio_type, config)
        metrics |= found
    if config.sequence_mask_metric is not None:
        mask, found = compute_sequence_mask(old_log_probs, rollout_logprobs, kept, config.sequence_mask_metric, config)
        kept, metrics = kept & mask.bool(), metrics | found
    return weights, kept, metrics


def _weight_metrics(factors: Tensor, kept: Tensor, trained: Tensor) -> dict[str, MetricValue]:
    return {
        f"{WEIGHT}_mean": Mean.over(factors, trained),
        f"{WEIGHT}_sq_mean": Mean.over(factors.square(), trained),
        "kept_token_ratio": Mean.over(kept, trained),
    }
