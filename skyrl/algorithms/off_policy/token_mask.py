"""Drop single tokens of an extreme ratio: the mask of IcePop."""

from __future__ import annotations

from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.mean import Mean, MetricValue
from skyrl.algorithms.off_policy.ratio import KEY, log_ratio, trained_tokens
from skyrl.algorithms.safe_exp import safe_exp
from skyrl.config.algorithm import OffPolicyCorrectionConfig
from skyrl.errors import ConfigError


def compute_token_mask(
    old_log_probs: Float[Tensor, "batch response"],
    rollout_logprobs: Float[Tensor, "batch response"],
    loss_mask: Shaped[Tensor, "batch response"] | None,
    off_policy_correction: OffPolicyCorrectionConfig,
) -> tuple[Float[Tensor, "batch response"], dict[str, MetricValue]]:
    """Keep a token iff low ≤ ρ ≤ high (IcePop, arXiv:2510.18855).

    Returns:
        1 for tokens to keep and masked ones, 0 for the others; and `token_mask_ratio`, the share of trained tokens
        that are dropped.

    Raises:
        ConfigError: Only one of the two bounds is set.
    """
    low = off_policy_correction.token_mask_is_threshold_low
    high = off_policy_correction.token_mask_is_threshold_high
    if low is None or high is None:
        raise ConfigError(
            f"{KEY}: set both token_mask_is_threshold_low and token_mask_is_threshold_high, got {low} and {high}"
        )
    trained = trained_tokens(old_log_probs, loss_mask)
    ratio = safe_exp(log_ratio(old_log_probs, rollout_logprobs, trained))
    dropped = trained & ~((ratio >= low) & (ratio <= high))
    return (~dropped).to(ratio.dtype), {"token_mask_ratio": Mean.over(dropped, trained)}
