"""KL-Cov: a KL penalty on the tokens whose covariance is highest."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide, weighted_sum
from skyrl.algorithms.policy_losses.covariance import token_covariance
from skyrl.algorithms.policy_losses.ratio import as_numbers, at_least_float32, log_ratio, safe_exp
from skyrl.algorithms.policy_losses.registry import register_policy_loss
from skyrl.config.algorithm import AlgorithmConfig


@register_policy_loss("kl_cov", correctable=False)
def kl_cov_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    config: AlgorithmConfig,
    loss_mask: Shaped[Tensor, "batch response"] | None = None,
    rollout_logprobs: Float[Tensor, "batch response"] | None = None,
    *,
    loss_weights: Float[Tensor, "batch response"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """KL-Cov: L = -ρA, plus c·|log_probs - old_log_probs| at the tokens of highest covariance (arXiv:2505.22617).

    Those are max(1, floor(`kl_cov.kl_cov_frac` times the trained tokens)); c is `kl_cov.ppo_kl_coef`. Nothing is
    clipped. Log-probs are in nats; for `loss_weights` see `regular`. Waits for the device once.

    Returns:
        The scalar loss, and `clip_ratio`, which is 0.
    """
    trained = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask.bool()
    advantages = at_least_float32(hide(advantages, trained))
    difference = log_ratio(log_probs, old_log_probs, trained)
    with torch.no_grad():
        covariance = token_covariance(at_least_float32(hide(log_probs, trained)), advantages, trained)
        punished = as_numbers(_highest(covariance, trained, config.kl_cov.kl_cov_frac), difference)
    penalty = difference.abs() * punished * config.kl_cov.ppo_kl_coef
    token_loss = penalty - safe_exp(difference) * advantages
    loss = weighted_sum(token_loss, loss_mask, loss_weights)
    return loss, {"clip_ratio": loss.new_zeros(())}


def _highest(
    values: Float[Tensor, "batch response"], trained: Bool[Tensor, "batch response"], share: float
) -> Bool[Tensor, "batch response"]:
    """Mark the max(1, floor(share · trained tokens)) largest values among trained tokens."""
    flat = torch.where(trained, values, -torch.inf).flatten()
    count = min(max(1, int(share * int(trained.sum()))), flat.numel())
    cells = flat.topk(count, sorted=False).indices
    return torch.zeros_like(flat, dtype=torch.bool).scatter(0, cells, True).view_as(values) & trained
