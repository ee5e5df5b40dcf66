"""The policy gradient with an importance ratio that nothing bounds."""

from __future__ import annotations

from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide, weighted_sum
from skyrl.algorithms.policy_losses.ratio import importance_ratio, mean_over_trained
from skyrl.algorithms.policy_losses.registry import register_policy_loss
from skyrl.config.algorithm import AlgorithmConfig


@register_policy_loss("importance_sampling")
def importance_sampling_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    config: AlgorithmConfig | None = None,
    loss_mask: Shaped[Tensor, "batch response"] | None = None,
    rollout_logprobs: Float[Tensor, "batch response"] | None = None,
    *,
    loss_weights: Float[Tensor, "batch response"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Importance sampling: L = -ρA with ρ = exp(log_probs - old_log_probs), the exponent within ±20.

    The surrogate that PPO clips (arXiv:1707.06347, eq. 6). Log-probs are in nats; for `loss_weights` see
    `regular`.

    Returns:
        The scalar loss, and `importance_ratio`: mean ρ over trained tokens.
    """
    ratio = importance_ratio(log_probs, old_log_probs, loss_mask)
    loss = -weighted_sum(ratio * hide(advantages, loss_mask), loss_mask, loss_weights)
    return loss, {"importance_ratio": mean_over_trained(ratio, loss_mask)}
