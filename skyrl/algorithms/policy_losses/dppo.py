"""DPPO: drop tokens by how far their probability moved, not by their ratio."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide, weighted_sum
from skyrl.algorithms.policy_losses.ratio import at_least_float32, importance_ratio, mean_over_trained
from skyrl.algorithms.policy_losses.registry import register_policy_loss
from skyrl.config.algorithm import AlgorithmConfig, DPPOConfig
from skyrl.errors import ConfigError


@register_policy_loss("dppo", needs_old_logprobs=False, anchored=True)
def dppo_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"] | None,
    advantages: Float[Tensor, "batch response"],
    config: AlgorithmConfig,
    loss_mask: Shaped[Tensor, "batch response"] | None = None,
    rollout_logprobs: Float[Tensor, "batch response"] | None = None,
    *,
    loss_weights: Float[Tensor, "batch response"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """DPPO: L = -ρ·A·k with ρ = exp(log_probs - rollout_logprobs) and k = 0 for tokens that moved too far.

    arXiv:2602.04879, with the binary divergences. A token is dropped when its advantage pushes it further and the
    divergence between sampler and model is above `dppo.delta_high` (rising) or `dppo.delta_low` (falling). No
    gradient flows through k. Without rollout_logprobs old_log_probs stand in. Log-probs are in nats; for
    `loss_weights` see `regular`.

    Returns:
        The scalar loss, and `clip_ratio`: share of trained tokens that are dropped.

    Raises:
        ValueError: Both rollout_logprobs and old_log_probs are missing.
    """
    behaviour = old_log_probs if rollout_logprobs is None else rollout_logprobs
    if behaviour is None:
        raise ValueError("policy loss 'dppo' needs rollout_logprobs (generator.sampling_params.logprobs=1) or old ones")
    advantages = hide(advantages, loss_mask)
    ratio = importance_ratio(log_probs, behaviour, loss_mask)
    with torch.no_grad():
        moved = _moved_too_far(at_least_float32(log_probs), at_least_float32(behaviour), advantages, config.dppo)
        dropped = moved.view(torch.uint8).to(ratio.dtype)
        pull = (dropped - 1) * advantages
    loss = weighted_sum(ratio * pull, loss_mask, loss_weights)
    return loss, {"clip_ratio": mean_over_trained(dropped, loss_mask)}


def _moved_too_far(
    log_probs: Float[Tensor, "batch response"],
    behaviour: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    config: DPPOConfig,
) -> Bool[Tensor, "batch response"]:
    """Whether each token's divergence is above the bound of the side to which its advantage pushes.

    Where the advantage is 0 nothing moves, whatever the log-probs (nats) are.

    Raises:
        ConfigError: The divergence has no such name.
    """
    if config.dppo_type == "binary_tv":
        rise = log_probs.exp() - behaviour.exp()
        return ((advantages > 0) & (rise > config.delta_high)) | ((advantages < 0) & (-rise > config.delta_low))
    if config.dppo_type == "binary_kl":
        divergence = _binary_kl(behaviour, log_probs)
        rising = (advantages > 0) & (log_probs > behaviour) & (divergence > config.delta_high)
        return rising | ((advantages < 0) & (log_probs < behaviour) & (divergence > config.delta_low))
    raise ConfigError(f"trainer.algorithm.dppo.dppo_type={config.dppo_type!r}: binary_tv or binary_kl")


def _binary_kl(
    behaviour: Float[Tensor, "batch response"], log_probs: Float[Tensor, "batch response"]
) -> Float[Tensor, "batch response"]:
    """KL in nats between (μ, 1 - μ) and (p, 1 - p), from ln μ and ln p, which are held within what exp can take."""
    log_mu, log_p = behaviour.clamp(min=-87.0, max=0.0), log_probs.clamp(min=-87.0, max=0.0)
    rest_before, rest = -log_mu.expm1(), -log_p.expm1()
    return (1 - rest_before) * (log_mu - log_p) + rest_before * ((rest_before + 1e-8) / (rest + 1e-8)).log()
