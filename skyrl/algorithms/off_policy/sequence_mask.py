"""Drop sequences whose tokens are, taken together, too likely or too unlikely for the sampler."""

from __future__ import annotations

from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.mean import MetricValue
from skyrl.algorithms.off_policy.ratio import KEY, interval_metrics, log_ratio, trained_tokens
from skyrl.algorithms.safe_exp import safe_exp
from skyrl.config.algorithm import OffPolicyCorrectionConfig
from skyrl.config.rules.choices import require_choice

SEQUENCE_MASK_METRICS = ("geometric", "product")
"""Values of `off_policy_correction.sequence_mask_metric`, besides None."""


def compute_sequence_mask(
    old_log_probs: Float[Tensor, "batch response"],
    rollout_logprobs: Float[Tensor, "batch response"],
    loss_mask: Shaped[Tensor, "batch response"] | None,
    sequence_mask_metric: str,
    off_policy_correction: OffPolicyCorrectionConfig,
) -> tuple[Float[Tensor, "batch 1"], dict[str, MetricValue]]:
    """Keep a row iff low ≤ x ≤ high, where x is the product or the geometric mean of ρ over its trained tokens.

    A row without trained tokens has x = 1.

    Returns:
        1 for rows to keep, 0 for the others; and the shares of the rows with a trained token that are dropped:
        `<geo or product>_sequence_mask_masked_ratio`, `..._over_high_ratio`, `..._under_low_ratio`.

    Raises:
        ConfigError: The metric has no such name.
    """
    require_choice(f"{KEY}.sequence_mask_metric", sequence_mask_metric, SEQUENCE_MASK_METRICS)
    trained = trained_tokens(old_log_probs, loss_mask)
    total = log_ratio(old_log_probs, rollout_logprobs, trained).sum(dim=-1)
    config = off_policy_correction
    if sequence_mask_metric == "geometric":
        ratio = safe_exp(total / trained.sum(dim=-1).clamp(min=1))
        prefix, low, high = "geo_sequence_mask", config.geo_mask_low, config.geo_mask_high
    else:
        ratio = safe_exp(total)
        prefix, low, high = "product_sequence_mask", config.product_mask_low, config.product_mask_high
    over, under = ratio > high, ~(ratio >= low)
    metrics = interval_metrics(prefix, over, under, trained.any(dim=-1))
    return (~(over | under)).to(ratio.dtype).unsqueeze(-1), metrics
