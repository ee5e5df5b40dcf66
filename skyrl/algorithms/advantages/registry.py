"""The registry of advantage estimators, and their contract.

An estimator is called with keywords `token_level_rewards`, `response_mask`, `index` (the uid of each row),
`values`, `grpo_norm_by_std`, `gamma`, `lambd` and `config`, as far as it names them or takes `**kwargs`;
`loss_mask`, `valid_rows`, `baseline_scores` and `reward_components` go to those that name them. It returns
`(advantages, returns)`, both shaped like the rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from torch import Tensor

from skyrl.utils.registry import Registry, require_name

AdvantageEstimator = Callable[..., tuple[Tensor, Tensor]]
EstimatorT = TypeVar("EstimatorT", bound=AdvantageEstimator)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorTraits:
    """What callers must know about an estimator."""

    outcome: bool = True
    """It reads only the sum of a row's rewards and gives the whole row one advantage."""
    needs_values: bool = False
    """It reads the critic's values."""
    needs_baseline: bool = False
    """It reads `baseline_scores`: one more, greedy rollout of each prompt."""


AdvantageEstimatorRegistry: Registry[AdvantageEstimator, EstimatorTraits] = Registry(
    "advantage estimator", home="skyrl.algorithms", default_traits=EstimatorTraits()
)


def register_advantage_estimator(
    name: str | Enum,
    *,
    outcome: bool = True,
    needs_values: bool = False,
    needs_baseline: bool = False,
    replaceable: bool = False,
) -> Callable[[EstimatorT], EstimatorT]:
    """Register the decorated function as an advantage estimator; see `EstimatorTraits` for the first three flags.

    `replaceable` is for built-in estimators whose name upstream does not have.

    Example: `@register_advantage_estimator("mine")`, then `trainer.algorithm.advantage_estimator=mine`.

    Raises:
        ValueError: The name is taken.
    """
    require_name(AdvantageEstimatorRegistry.kind, name)

    def decorate(function: EstimatorT) -> EstimatorT:
        traits = EstimatorTraits(outcome=outcome, needs_values=needs_values, needs_baseline=needs_baseline)
        AdvantageEstimatorRegistry.register(name, function, traits=traits, replaceable=replaceable)
        return function

    return decorate
