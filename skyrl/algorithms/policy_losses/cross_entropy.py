"""Cross-entropy of the given tokens."""

from __future__ import annotations

from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import weighted_sum
from skyrl.algorithms.policy_losses.ratio import at_least_float32
from skyrl.algorithms.policy_losses.registry import register_policy_loss
from skyrl.config.algorithm import AlgorithmConfig


@register_policy_loss("cross_entropy", needs_old_logprobs=False, regularized=False)
def cross_entropy_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"] | None = None,
    advantages: Float[Tensor, "batch response"] | None = None,
    config: AlgorithmConfig | None = None,
    loss_mask: Shaped[Tensor, "batch response"] | None = None,
    rollout_logprobs: Float[Tensor, "batch response"] | None = None,
    *,
    loss_weights: Float[Tensor, "batch response"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Supervised learning: L = -log_probs, in nats, whatever the advantages.

    The sum is over trained tokens and not divided by anything; a mask with other values than 0 and 1 weighs
    tokens, and so do `loss_weights`.

    Returns:
        The scalar loss, and `clip_ratio`, which is 0.
    """
    loss = weighted_sum(-at_least_float32(log_probs), loss_mask, loss_weights)
    return loss, {"clip_ratio": loss.new_zeros(())}
