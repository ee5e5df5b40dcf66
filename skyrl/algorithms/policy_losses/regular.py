"""PPO's clipped surrogate."""

from __future__ import annotations

from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide, weighted_sum
from skyrl.algorithms.policy_losses.clipped_ratio import pessimistic_ratio
from skyrl.algorithms.policy_losses.ratio import importance_ratio, mean_over_trained
from skyrl.algorithms.policy_losses.registry import register_policy_loss
from skyrl.config.algorithm import AlgorithmConfig


@register_policy_loss("regular")
def regular_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    config: AlgorithmConfig,
    loss_mask: Shaped[Tensor, "batch response"] | None = None,
    rollout_logprobs: Float[Tensor, "batch response"] | None = None,
    *,
    loss_weights: Float[Tensor, "batch response"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """PPO: L = -min(ρA, clip(ρ, 1 - ε_low, 1 + ε_high)·A) with ρ = exp(log_probs - old_log_probs).

    arXiv:1707.06347, eq. 7; separate ε as in DAPO, arXiv:2503.14476. Log-probs are in nats. `loss_weights`
    hold the loss reduction (`loss_reduction.py`), so the sum over a mini-batch is the final loss; None sums
    plainly.

    Returns:
        The scalar loss, and `clip_ratio`: share of trained tokens whose clipped term is the lower.
    """
    shown = None if loss_mask is None else loss_mask.bool()
    advantages = hide(advantages, shown)
    ratio, clipped = pessimistic_ratio(importance_ratio(log_probs, old_log_probs, shown), advantages, config)
    loss = -weighted_sum(ratio * advantages, loss_mask, loss_weights)
    return loss, {"clip_ratio": mean_over_trained(clipped, loss_mask)}
