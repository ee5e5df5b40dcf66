"""SAPO: a smooth gate instead of a clip."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide, weighted_sum
from skyrl.algorithms.policy_losses.ratio import importance_ratio
from skyrl.algorithms.policy_losses.reduction_advice import advise_sequence_mean
from skyrl.algorithms.policy_losses.registry import register_policy_loss
from skyrl.config.algorithm import AlgorithmConfig


@register_policy_loss("sapo")
def sapo_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    config: AlgorithmConfig,
    loss_mask: Shaped[Tensor, "batch response"] | None = None,
    rollout_logprobs: Float[Tensor, "batch response"] | None = None,
    *,
    loss_weights: Float[Tensor, "batch response"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """SAPO: L = -f(ρ)·A with f(ρ) = (4/τ)·sigmoid(τ(ρ - 1)), ρ = exp(log_probs - old_log_probs).

    arXiv:2511.20347. τ is `sapo.tau_pos` where A > 0, else `sapo.tau_neg`; f'(1) = 1 for every τ.
    Log-probs are in nats; for `loss_weights` see `regular`.

    Returns:
        The scalar loss, and `clip_ratio`, which is 0.
    """
    advise_sequence_mean("sapo", config.loss_reduction)
    advantages = hide(advantages, loss_mask)
    ratio = importance_ratio(log_probs, old_log_probs, loss_mask)
    positive = advantages.clone().gt_(0.0).to(ratio.dtype)
    tau = positive * config.sapo.tau_pos + (1 - positive) * config.sapo.tau_neg
    gate = torch.sigmoid((ratio - 1) * tau)
    loss = weighted_sum(gate * (-4 * advantages / tau), loss_mask, loss_weights)
    return loss, {"clip_ratio": loss.new_zeros(())}
