"""GSPO: one importance ratio a sequence."""

from __future__ import annotations

from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide, masked_mean, weighted_sum
from skyrl.algorithms.policy_losses.clipped_ratio import pessimistic_ratio
from skyrl.algorithms.policy_losses.ratio import log_ratio, mean_over_trained
from skyrl.algorithms.policy_losses.reduction_advice import advise_sequence_mean
from skyrl.algorithms.policy_losses.registry import register_policy_loss
from skyrl.config.algorithm import AlgorithmConfig


@register_policy_loss("gspo")
def gspo_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    config: AlgorithmConfig,
    loss_mask: Shaped[Tensor, "batch response"] | None = None,
    rollout_logprobs: Float[Tensor, "batch response"] | None = None,
    *,
    loss_weights: Float[Tensor, "batch response"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """GSPO-token: `regular` with the row's geometric mean ratio s at each token (arXiv:2507.18071, eq. 13-14).

    ρ_t = sg(s)·π_t/sg(π_t) with log s = mean over the row's trained tokens of log_probs - old_log_probs, and at
    most 10. With one advantage a row and `sequence_mean`, value and gradient are those of GSPO (eq. 5).
    Log-probs are in nats; for `loss_weights` see `regular`.

    Returns:
        The scalar loss, and `clip_ratio`: share of trained tokens whose clipped term is the lower.
    """
    advise_sequence_mean("gspo", config.loss_reduction)
    advantages = hide(advantages, loss_mask)
    difference = log_ratio(log_probs, old_log_probs, loss_mask)
    sequence = masked_mean(difference.detach(), loss_mask, dim=-1).unsqueeze(-1)
    own_gradient = difference - difference.detach()  # zero, with the gradient of log_probs
    ratio = (own_gradient + sequence).clamp(max=10.0).exp()
    ratio, clipped = pessimistic_ratio(ratio, advantages, config)
    loss = -weighted_sum(ratio * advantages, loss_mask, loss_weights)
    return loss, {"clip_ratio": mean_over_trained(clipped, loss_mask)}
