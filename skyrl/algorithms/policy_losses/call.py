"""Call a policy loss, built in or a user's, the same way everywhere."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide
from skyrl.algorithms.policy_losses.registry import LossTraits, PolicyLoss, PolicyLossRegistry
from skyrl.algorithms.signatures import accepted_keywords, named_keywords, require_shape
from skyrl.config.algorithm import AlgorithmConfig


def compute_policy_loss(
    name_or_fn: str | PolicyLoss,
    *,
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"] | None,
    advantages: Float[Tensor, "batch response"],
    config: AlgorithmConfig,
    loss_mask: Shaped[Tensor, "batch response"] | None = None,
    rollout_logprobs: Float[Tensor, "batch response"] | None = None,
    loss_weights: Float[Tensor, "batch response"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Compute the summed loss of a micro-batch.

    A loss that takes no `loss_weights` gets advantages multiplied by them, which is the same for every loss
    that is linear in the advantages.

    Args:
        name_or_fn: A registered name, or the function itself.
        log_probs: Now, in nats (has grad).
        old_log_probs: Before this update; None when the forward pass was skipped.
        advantages: Not scaled by the reduction.
        config: `trainer.algorithm`.
        loss_mask: 1 = trains.
        rollout_logprobs: Of the policy that sampled; None when the engine returned none.
        loss_weights: The loss reduction of the mini-batch (`loss_reduction.py`).

    Returns:
        The scalar, and metrics without gradient.

    Raises:
        ConfigError: The name is unknown.
        ValueError: A tensor has another shape than `log_probs`, a tensor that the loss needs is missing, or
            the loss is no scalar.
    """
    function = PolicyLossRegistry.get(name_or_fn) if isinstance(name_or_fn, str) else name_or_fn
    traits = PolicyLossRegistry.traits(name_or_fn) if isinstance(name_or_fn, str) else None
    tensors = {
        "old_log_probs": old_log_probs,
        "advantages": advantages,
        "loss_mask": loss_mask,
        "rollout_logprobs": rollout_logprobs,
        "loss_weights": loss_weights,
    }
    for name, tensor in tensors.items():
        if tensor is not None:
            require_shape(name, tensor, "log_probs", log_probs)
    _require_inputs(name_or_fn, traits, old_log_probs, rollout_logprobs)
    offers: dict[str, Any] = {"config": config, "loss_mask": loss_mask, "rollout_logprobs": rollout_logprobs}
    arguments = {name: offers[name] for name in accepted_keywords(function, offers)}
    if "loss_weights" in named_keywords(function):
        arguments["loss_weights"] = loss_weights
    elif loss_weights is not None:
        advantages = hide(advantages * loss_weights, loss_mask)
    return _unpack(name_or_fn, function(log_probs, old_log_probs, advantages, **arguments))


def _require_inputs(
    name_or_fn: str | PolicyLoss,
    traits: LossTraits | None,
    old_log_probs: Tensor | None,
    rollout_logprobs: Tensor | None,
) -> None:
    if traits is None:
        return
    if traits.needs_old_logprobs and old_log_probs is None:
        raise ValueError(f"policy loss {name_or_fn!r} needs old_log_probs, but the old forward pass was skipped")
    if traits.needs_rollout_logprobs and rollout_logprobs is None:
        raise ValueError(f"policy loss {name_or_fn!r} needs rollout_logprobs; set generator.sampling_params.logprobs=1")


def _unpack(
    name_or_fn: str | PolicyLoss, result: Tensor | tuple[Tensor, dict[str, Any]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Bring a bare scalar or float metrics into the one form."""
    loss, metrics = (result, {}) if isinstance(result, Tensor) else result
    if loss.numel() != 1:
        raise ValueError(f"policy loss {name_or_fn!r} returned shape {tuple(loss.shape)}; sum it over tokens")
    tensors = {
        name: torch.as_tensor(value, dtype=torch.float32, device=loss.device).detach()
        for name, value in metrics.items()
    }
    return loss.reshape(()), tensors
