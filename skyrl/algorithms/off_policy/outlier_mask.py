"""Drop sequences that hold a token of an extreme ratio."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.mean import MetricValue
from skyrl.algorithms.off_policy.ratio import interval_metrics, log_ratio, trained_tokens
from skyrl.algorithms.safe_exp import safe_exp
from skyrl.config.algorithm import OffPolicyCorrectionConfig


def compute_outlier_token_mask(
    old_log_probs: Float[Tensor, "batch response"],
    rollout_logprobs: Float[Tensor, "batch response"],
    loss_mask: Shaped[Tensor, "batch response"] | None,
    off_policy_correction: OffPolicyCorrectionConfig,
) -> tuple[Float[Tensor, "batch 1"], dict[str, MetricValue]]:
    """Keep a row unless one of its trained tokens has ρ above the high or below the low outlier threshold.

    Returns:
        1 for rows to keep, 0 for the others; and the shares of the rows with a trained token that are dropped:
        `outlier_seq_masked_ratio`, `outlier_seq_over_high_ratio`, `outlier_seq_under_low_ratio`.
    """
    trained = trained_tokens(old_log_probs, loss_mask)
    ratio = safe_exp(log_ratio(old_log_probs, rollout_logprobs, trained))
    low = off_policy_correction.outlier_token_is_threshold_low
    high = off_policy_correction.outlier_token_is_threshold_high
    over = (trained & (ratio > (torch.inf if high is None else high))).any(dim=-1)
    under = (trained & (ratio < (-torch.inf if low is None else low))).any(dim=-1)
    metrics = interval_metrics("outlier_seq", over, under, trained.any(dim=-1))
    return (~(over | under)).to(ratio.dtype).unsqueeze(-1), metrics
