"""Truncated importance sampling: weigh by the ratio of the old policy to the sampler, up to a cap."""

from __future__ import annotations

from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.mean import Mean, MetricValue
from skyrl.algorithms.off_policy.ratio import KEY, log_ratio, trained_tokens
from skyrl.algorithms.safe_exp import safe_exp
from skyrl.config.algorithm import OffPolicyCorrectionConfig
from skyrl.config.rules.choices import require_choice

TIS_RATIO_TYPES = ("token", "sequence")
"""Values of `off_policy_correction.tis_ratio_type`, besides None."""


def compute_tis_ratio(
    old_log_probs: Float[Tensor, "batch response"],
    rollout_logprobs: Float[Tensor, "batch response"],
    loss_mask: Shaped[Tensor, "batch response"] | None,
    tis_ratio_type: str,
    off_policy_correction: OffPolicyCorrectionConfig,
) -> tuple[Float[Tensor, "batch width"], dict[str, MetricValue]]:
    """Weight of each token, min(ρ, cap), or of each row, min(Π ρ, cap) (arXiv:1802.01561, section 4).

    An infinite cap gives the weights of decoupled PPO (arXiv:2110.00641).

    Returns:
        Weights without gradient, of width `response` for tokens (1 where masked) and 1 for rows; and the share
        of trained tokens (`tis_token_clip_high_ratio`), or of rows with one (`tis_seq_clip_high_ratio`), that
        the cap lowers.

    Raises:
        ConfigError: The type has no such name.
    """
    require_choice(f"{KEY}.tis_ratio_type", tis_ratio_type, TIS_RATIO_TYPES)
    trained = trained_tokens(old_log_probs, loss_mask)
    diff = log_ratio(old_log_probs, rollout_logprobs, trained)
    if tis_ratio_type == "token":
        ratio, cap = safe_exp(diff), off_policy_correction.token_tis_ratio_clip_high
        metric, counted = "tis_token_clip_high_ratio", trained
    else:
        ratio, cap = safe_exp(diff.sum(dim=-1, keepdim=True)), off_policy_correction.sequence_tis_ratio_clip_high
        metric, counted = "tis_seq_clip_high_ratio", trained.any(dim=-1, keepdim=True)
    return ratio.clamp(max=cap), {metric: Mean.over(ratio > cap, counted)}
