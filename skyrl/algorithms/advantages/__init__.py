"""Advantage estimators by name (`trainer.algorithm.advantage_estimator`); importing this registers the built-ins."""

from skyrl.algorithms.advantages import gae, grpo, reinforce_plus_plus, rloo
from skyrl.algorithms.advantages.estimate import compute_advantages_and_returns, normalize_advantages
from skyrl.algorithms.advantages.registry import (
    AdvantageEstimatorRegistry,
    EstimatorTraits,
    register_advantage_estimator,
)

__all__ = [
    "AdvantageEstimatorRegistry",
    "EstimatorTraits",
    "compute_advantages_and_returns",
    "gae",
    "grpo",
    "normalize_advantages",
    "register_advantage_estimator",
    "reinforce_plus_plus",
    "rloo",
]
