"""Correction for the gap between the policy that sampled and the policy that trains."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.mean import MetricValue
from skyrl.config.algorithm import OffPolicyCorrectionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What a correction does to one micro-batch, without gradient."""

    factors: Float[Tensor, "batch response"]
    """Multiplies each token's loss; 0 drops the token."""
    metrics: dict[str, MetricValue]
    """Diagnostics, by the names of `loss_metrics/`."""


def is_active(config: OffPolicyCorrectionConfig) -> bool:
    """Whether any correction is configured."""
    values = (
        *(config.tis_ratio_type, config.sequence_mask_metric),
        *(config.outlier_token_is_threshold_low, config.outlier_token_is_threshold_high),
        *(config.token_mask_is_threshold_low, config.token_mask_is_threshold_high),
    )
    return any(value is not None for value in values)


def compute_correction(
    old_log_probs: Float[Tensor, "batch response"],
    rollout_logprobs: Float[Tensor, "batch response"],
    loss_mask: Shaped[Tensor, "batch response"] | None,
    config: OffPolicyCorrectionConfig,
) -> Correction:
    """Compute what the configured corrections do, in the order of algorithms.md 6."""
    raise NotImplementedError
