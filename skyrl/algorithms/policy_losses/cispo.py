"""CISPO: clamp the importance weight, keep every token's gradient."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide, masked_max, masked_min, weighted_sum
from skyrl.algorithms.policy_losses.ratio import importance_ratio, mean_over_trained
from skyrl.algorithms.policy_losses.registry import register_policy_loss
from skyrl.config.algorithm import AlgorithmConfig


def anchors_on_old(config: AlgorithmConfig) -> bool:
    """Whether the ratio is taken to the trainer's log-probs before the update."""
    return config.cispo.cispo_anchor == "old"


def anchors_on_rollout(config: AlgorithmConfig) -> bool:
    """Whether the ratio is taken to the sampler's log-probs."""
    return config.cispo.cispo_anchor == "rollout"


@register_policy_loss(
    "cispo",
    needs_old_logprobs=anchors_on_old,
    needs_rollout_logprobs=anchors_on_rollout,
    anchored=anchors_on_rollout,
)
def cispo_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"] | None,
    advantages: Float[Tensor, "batch response"],
    config: AlgorithmConfig,
    loss_mask: Shaped[Tensor, "batch response"] | None = None,
    rollout_logprobs: Float[Tensor, "batch response"] | None = None,
    *,
    loss_weights: Float[Tensor, "batch response"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """CISPO: L = -sg(clip(ρ, 1 - a, 1 + b))·A·log_probs (arXiv:2506.13585, eq. 4-5).

    ρ = exp(log_probs - anchor), where the anchor is old_log_probs or rollout_logprobs by `cispo.cispo_anchor`;
    a and b are `cispo.cispo_eps_clip_low` and `_high`. Log-probs are in nats; for `loss_weights` see `regular`.

    Returns:
        The scalar loss; `clip_ratio`: share of trained tokens whose ratio is out of the range; and
        `cispo/ratio_mean`, `cispo/ratio_clamped_mean`, `cispo/ratio_max`, `cispo/ratio_min` over trained
        tokens, all 0 if there is none.

    Raises:
        ValueError: The anchor's log-probs are missing.
    """
    anchor = rollout_logprobs if anchors_on_rollout(config) else old_log_probs
    if anchor is None:
        raise ValueError(f"trainer.algorithm.cispo.cispo_anchor={config.cispo.cispo_anchor} needs those log-probs")
    ratio = importance_ratio(log_probs.detach(), anchor, loss_mask)
    clamped = ratio.clamp(min=1 - config.cispo.cispo_eps_clip_low, max=1 + config.cispo.cispo_eps_clip_high)
    loss = -weighted_sum(log_probs * hide(clamped * advantages, loss_mask), loss_mask, loss_weights)
    return loss, _ratio_metrics(ratio, clamped, loss_mask)


def _ratio_metrics(ratio: Tensor, clamped: Tensor, loss_mask: Tensor | None) -> dict[str, Tensor]:
    trained = torch.ones_like(ratio, dtype=torch.bool) if loss_mask is None else loss_mask.bool()
    any_trained = trained.any()
    return {
        "clip_ratio": mean_over_trained(ratio.clone().ne_(clamped), loss_mask),
        "cispo/ratio_mean": mean_over_trained(ratio, loss_mask),
        "cispo/ratio_clamped_mean": mean_over_trained(clamped, loss_mask),
        "cispo/ratio_max": torch.where(any_trained, masked_max(ratio, trained), 0.0),
        "cispo/ratio_min": torch.where(any_trained, masked_min(ratio, trained), 0.0),
    }
