"""The registry of policy losses, and their contract.

A loss is called as `loss(log_probs, old_log_probs, advantages, config=..., loss_mask=..., rollout_logprobs=...)`,
all tensors (batch, response), and gets of the keywords only those it takes. It returns a scalar that is a *sum*
over tokens, or the scalar and a dict of metrics. A keyword-only `loss_weights` opts in to the weights of the
loss reduction; without it the advantages come already multiplied by them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from torch import Tensor

from skyrl.utils.registry import Registry

PolicyLoss = Callable[..., Tensor | tuple[Tensor, dict[str, Any]]]
LossT = TypeVar("LossT", bound=PolicyLoss)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTraits:
    """What callers must know about a loss."""

    needs_old_logprobs: bool = True
    """It reads the log-probs that the trainer recomputes before the update."""
    needs_rollout_logprobs: bool = False
    """It reads the log-probs of the policy that sampled."""


PolicyLossRegistry: Registry[PolicyLoss, LossTraits] = Registry(
    "policy loss", home="skyrl.algorithms", default_traits=LossTraits()
)


def register_policy_loss(
    name: str | Enum,
    *,
    needs_old_logprobs: bool = True,
    needs_rollout_logprobs: bool = False,
    replaceable: bool = False,
) -> Callable[[LossT], LossT]:
    """Register the decorated function as a policy loss; see `LossTraits` for the first two flags.

    `replaceable` is for built-in losses whose name upstream does not have.

    Example: `@register_policy_loss("mine")`, then `trainer.algorithm.policy_loss_type=mine`.

    Raises:
        ValueError: The name is taken.
    """

    def decorate(function: LossT) -> LossT:
        traits = LossTraits(needs_old_logprobs=needs_old_logprobs, needs_rollout_logprobs=needs_rollout_logprobs)
        PolicyLossRegistry.register(name, function, traits=traits, replaceable=replaceable)
        return function

    return decorate
