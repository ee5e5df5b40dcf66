"""PPO's clipped surrogate with a second bound for negative advantages."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide, weighted_sum
from skyrl.algorithms.policy_losses.clipped_ratio import pessimistic_ratio
from skyrl.algorithms.policy_losses.ratio import importance_ratio, mean_over_trained
from skyrl.algorithms.policy_losses.registry import register_policy_loss
from skyrl.config.algorithm import AlgorithmConfig


@register_policy_loss("dual_clip")
def dual_clip_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    config: AlgorithmConfig,
    loss_mask: Shaped[Tensor, "batch response"] | None = None,
    rollout_logprobs: Float[Tensor, "batch response"] | None = None,
    *,
    loss_weights: Float[Tensor, "batch response"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Dual-clip PPO: `regular`, and where A < 0 at most -cA with c = `clip_ratio_c`.

    arXiv:1912.09729, eq. 5. PPO has no bound where a token with a negative advantage became likelier; this is
    one. Log-probs are in nats; for `loss_weights` see `regular`.

    Returns:
        The scalar loss, and `clip_ratio` as of `regular`: the second bound does not count.
    """
    shown = None if loss_mask is None else loss_mask.bool()
    advantages = hide(advantages, shown)
    ratio, clipped = pessimistic_ratio(importance_ratio(log_probs, old_log_probs, shown), advantages, config)
    with torch.no_grad():
        bounded = (ratio * -advantages.sign()).gt_(config.clip_ratio_c)  # 1 where A < 0 and ρ > c > 1
        free, bound = 1 - bounded, bounded.mul_(config.clip_ratio_c)
    ratio = torch.addcmul(bound, ratio, free)
    loss = -weighted_sum(ratio * advantages, loss_mask, loss_weights)
    return loss, {"clip_ratio": mean_over_trained(clipped, loss_mask)}
