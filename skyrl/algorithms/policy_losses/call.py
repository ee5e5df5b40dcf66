"""Call a policy loss, built in or a user's, the same way everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide
from skyrl.algorithms.mean import Mean, MetricValue
from skyrl.algorithms.off_policy import Correction, compute_correction, is_active
from skyrl.algorithms.policy_losses.registry import (
    LossTraits,
    PolicyLoss,
    PolicyLossRegistry,
    holds,
    require_correctable,
)
from skyrl.algorithms.score_centering import SamplerHead
from skyrl.algorithms.signatures import accepted_keywords, named_keywords, require_shape
from skyrl.config.algorithm import AlgorithmConfig


def compute_policy_loss(  # noqa: PLR0913 - what losses may ask for
    name_or_fn: str | PolicyLoss,
    *,
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"] | None,
    advantages: Float[Tensor, "batch response"],
    config: AlgorithmConfig,
    loss_mask: Shaped[Tensor, "batch response"] | None = None,
    rollout_logprobs: Float[Tensor, "batch response"] | None = None,
    loss_weights: Float[Tensor, "batch response"] | None = None,
    support: Int[Tensor, "batch response width"] | None = None,
    topk: SamplerHead | None = None,
    batch: Mapping[str, Any] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, MetricValue]]:
    """Compute the summed loss of a micro-batch, off-policy correction included.

    The off-policy correction becomes factors of `loss_weights`. A loss that takes no `loss_weights` gets advantages
    multiplied by the reduction, which is the same for every loss that is linear in the advantages; it corrects by
    itself (`off_policy.apply_off_policy_correction`) or not at all.

    Args:
        name_or_fn: A registered name, or the function itself.
        log_probs: Now, in nats (has grad).
        old_log_probs: Before this update; None when the forward pass was skipped.
        advantages: Not scaled by the reduction.
        config: `trainer.algorithm`.
        loss_mask: 1 = trains.
        rollout_logprobs: Of the policy that sampled; None when the engine returned none.
        loss_weights: The loss reduction of the mini-batch (`loss_reduction.py`).
        support: Candidates that the sampler kept; for losses that name it, as are the next two.
        topk: The sampler's head.
        batch: All columns of the micro-batch.

    Returns:
        The scalar, and metrics without gradient.

    Raises:
        ConfigError: The name is unknown, or the configured correction does not go with the loss.
        ValueError: A tensor has another shape than `log_probs`, a tensor that the loss needs is missing, or
            the loss is no scalar.
    """
    function = PolicyLossRegistry.get(name_or_fn) if isinstance(name_or_fn, str) else name_or_fn
    traits = PolicyLossRegistry.traits(name_or_fn) if isinstance(name_or_fn, str) else LossTraits()
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
    if isinstance(name_or_fn, str):
        require_correctable(name_or_fn, traits, config)
        _require_inputs(name_or_fn, traits, config, old_log_probs, rollout_logprobs)
    offers: dict[str, Any] = {"config": config, "loss_mask": loss_mask, "rollout_logprobs": rollout_logprobs}
    arguments = {name: offers[name] for name in accepted_keywords(function, offers)}
    named = named_keywords(function)
    extras: dict[str, Any] = {"support": support, "topk": topk, "batch": batch}
    arguments |= {name: value for name, value in extras.items() if name in named}
    metrics: dict[str, MetricValue] = {}
    if "loss_weights" in named:
        correction = _correction(old_log_probs, rollout_logprobs, loss_mask, config)
        if correction is not None:
            metrics = correction.metrics
            loss_weights = correction.factors if loss_weights is None else loss_weights * correction.factors
        arguments["loss_weights"] = loss_weights
    elif loss_weights is not None:
        advantages = hide(advantages * loss_weights, loss_mask)
    loss, own = _unpack(name_or_fn, function(log_probs, old_log_probs, advantages, **arguments))
    _require_gradient(name_or_fn, loss, log_probs)
    return loss, metrics | own


def _correction(
    old_log_probs: Tensor | None,
    rollout_logprobs: Tensor | None,
    loss_mask: Tensor | None,
    config: AlgorithmConfig,
) -> Correction | None:
    key = "trainer.algorithm.off_policy_correction"
    if not is_active(config.off_policy_correction):
        return None
    if rollout_logprobs is None:
        raise ValueError(f"{key} needs rollout_logprobs; set generator.sampling_params.logprobs=1")
    if old_log_probs is None:
        raise ValueError(f"{key} needs old_log_probs, but the old forward pass was skipped")
    return compute_correction(old_log_probs, rollout_logprobs, loss_mask, config.off_policy_correction)


def _require_inputs(
    name: str,
    traits: LossTraits,
    config: AlgorithmConfig,
    old_log_probs: Tensor | None,
    rollout_logprobs: Tensor | None,
) -> None:
    if old_log_probs is None and holds(traits.needs_old_logprobs, config):
        raise ValueError(f"policy loss {name!r} needs old_log_probs, but the old forward pass was skipped")
    if rollout_logprobs is None and holds(traits.needs_rollout_logprobs, config):
        raise ValueError(f"policy loss {name!r} needs rollout_logprobs; set generator.sampling_params.logprobs=1")


def _unpack(
    name_or_fn: str | PolicyLoss, result: Tensor | tuple[Tensor, Mapping[str, MetricValue | float]]
) -> tuple[Tensor, dict[str, MetricValue]]:
    """Bring a bare scalar or float metrics into the one form.

    Raises:
        ValueError: It is neither a scalar tensor nor such a scalar and a dict of numbers.
    """
    form = "it must return the loss, a scalar tensor, or the loss and a dict of metrics"
    loss, metrics = result if isinstance(result, tuple | list) and len(result) == 2 else (result, {})
    if not isinstance(loss, Tensor) or not isinstance(metrics, Mapping):
        raise ValueError(f"policy loss {name_or_fn!r} returned {_described(result)}; {form}")
    if loss.numel() != 1:
        raise ValueError(f"policy loss {name_or_fn!r} returned shape {tuple(loss.shape)}; sum it over tokens")
    return loss.reshape(()), {
        str(name): _without_grad(name_or_fn, name, value, loss.device) for name, value in metrics.items()
    }


def _described(result: object) -> str:
    if isinstance(result, tuple | list):
        return f"{len(result)} values ({', '.join(type(part).__name__ for part in result)})"
    return "nothing" if result is None else f"a {type(result).__name__}"


def _require_gradient(name_or_fn: str | PolicyLoss, loss: Tensor, log_probs: Tensor) -> None:
    """Refuse a loss that would train nothing, where gradients are wanted.

    Raises:
        ValueError: It does not depend on `log_probs`.
    """
    if log_probs.requires_grad and torch.is_grad_enabled() and not loss.requires_grad:
        raise ValueError(
            f"policy loss {name_or_fn!r} returned a value without gradient; compute it from log_probs, without "
            "detach(), item() or no_grad()"
        )


def _without_grad(
    loss_name: str | PolicyLoss, name: str, value: MetricValue | float, device: torch.device
) -> MetricValue:
    if isinstance(value, Mean):
        return Mean(value.total.detach(), value.count.detach())
    try:
        number = torch.as_tensor(value, dtype=torch.float32, device=device).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"policy loss {loss_name!r}: metric {name!r} is {value!r}, not a number") from error
    if number.numel() != 1:
        raise ValueError(
            f"policy loss {loss_name!r}: metric {name!r} has shape {tuple(number.shape)}; reduce it to one number"
        )
    return number.reshape(())
