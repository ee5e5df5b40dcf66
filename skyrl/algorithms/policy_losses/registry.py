"""The registry of policy losses, and their contract.

A loss is called as `loss(log_probs, old_log_probs, advantages, config=..., loss_mask=..., rollout_logprobs=...)`,
all tensors (batch, response), and gets of the keywords only those it takes. It returns a scalar that is a *sum*
over tokens, or the scalar and a dict of metrics (numbers, tensors, or `Mean`s). Keywords that opt in, for functions
that name them:

* `loss_weights`: the weights of the loss reduction, times the factors of the off-policy correction. Without it the
  advantages come already multiplied by the reduction, and the loss corrects by itself
  (`off_policy.apply_off_policy_correction`) or not at all.
* `support`: the candidates that the sampler kept at each token, ids (batch, response, width), -1 pads.
* `topk`: the sampler's head (`score_centering.SamplerHead`) while score centering is on.
* `batch`: all columns of the micro-batch, by upstream's names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from torch import Tensor

from skyrl.algorithms.mean import MetricValue
from skyrl.algorithms.off_policy import is_active
from skyrl.algorithms.signatures import require_call
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.errors import ConfigError
from skyrl.utils.registry import Registry, require_name

PolicyLoss = Callable[..., Tensor | tuple[Tensor, Mapping[str, MetricValue | float]]]
LossT = TypeVar("LossT", bound=PolicyLoss)


Need = bool | Callable[[AlgorithmConfig], bool]
"""Whether something holds for a loss; a function where settings decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTraits:
    """What callers must know about a loss."""

    needs_old_logprobs: Need = True
    """It reads the log-probs that the trainer recomputes before the update."""
    needs_rollout_logprobs: Need = False
    """It reads the log-probs of the policy that sampled."""
    correctable: bool = True
    """Off-policy corrections apply to it."""
    anchored: Need = False
    """Its ratio is that to the sampler already: truncated importance sampling would count it twice."""
    regularized: bool = True
    """KL and entropy terms are added to it."""


OFFERED = ("config", "loss_mask", "rollout_logprobs")
"""Keywords that a loss gets if it takes them."""
OPT_IN = ("loss_weights", "support", "topk", "batch")
"""Keywords that a loss gets if it names them."""


def _check_signature(name: str, function: PolicyLoss) -> None:
    require_call(f"policy loss {name!r}", function, ("log_probs", "old_log_probs", "advantages"), OFFERED, OPT_IN)


PolicyLossRegistry: Registry[PolicyLoss, LossTraits] = Registry(
    "policy loss", home="skyrl.algorithms", default_traits=LossTraits(), check=_check_signature
)


def holds(need: Need, algorithm: AlgorithmConfig) -> bool:
    """Return what a trait is under these settings."""
    return need(algorithm) if callable(need) else need


def reads_old_log_probs(algorithm: AlgorithmConfig) -> bool:
    """Whether an update needs the forward pass before it, for its loss or for an off-policy correction."""
    traits = PolicyLossRegistry.traits(algorithm.policy_loss_type)
    return is_active(algorithm.off_policy_correction) or holds(traits.needs_old_logprobs, algorithm)


def require_correctable(loss: str, traits: LossTraits, algorithm: AlgorithmConfig) -> None:
    """Refuse an off-policy correction that does not go with a loss.

    Raises:
        ConfigError: The loss takes no correction, or its own ratio is what importance sampling would apply again.
    """
    key, correction = "trainer.algorithm.off_policy_correction", algorithm.off_policy_correction
    if not is_active(correction):
        return
    if not traits.correctable:
        raise ConfigError(f"policy loss {loss!r} does not work with {key}; turn one of them off")
    if correction.tis_ratio_type is not None and holds(traits.anchored, algorithm):
        raise ConfigError(
            f"policy loss {loss!r} corrects by the ratio to the sampler already; set {key}.tis_ratio_type=null"
        )


def register_policy_loss(
    name: str | Enum,
    *,
    needs_old_logprobs: Need = True,
    needs_rollout_logprobs: Need = False,
    correctable: bool = True,
    anchored: Need = False,
    regularized: bool = True,
    replaceable: bool = False,
) -> Callable[[LossT], LossT]:
    """Register the decorated function as a policy loss; see `LossTraits` for the first four flags.

    `replaceable` is for built-in losses whose name upstream does not have.

    Example: `@register_policy_loss("mine")`, then `trainer.algorithm.policy_loss_type=mine`.

    Raises:
        ValueError: The name is taken.
    """
    require_name(PolicyLossRegistry.kind, name)

    def decorate(function: LossT) -> LossT:
        traits = LossTraits(
            needs_old_logprobs=needs_old_logprobs,
            needs_rollout_logprobs=needs_rollout_logprobs,
            correctable=correctable,
            anchored=anchored,
            regularized=regularized,
        )
        PolicyLossRegistry.register(name, function, traits=traits, replaceable=replaceable)
        return function

    return decorate
