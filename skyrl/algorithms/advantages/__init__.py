"""Advantage estimators by name (`trainer.algorithm.advantage_estimator`); importing this registers the built-ins."""

from skyrl.algorithms.advantages import (
    gae,
    gdpo,
    gpg,
    grpo,
    liteppo,
    maxrl,
    no_op,
    opo,
    pass_at_k,
    reinforce_plus_plus,
    remax,
    rloo,
    turn_level,
)
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
    "gdpo",
    "gpg",
    "grpo",
    "liteppo",
    "maxrl",
    "no_op",
    "normalize_advantages",
    "opo",
    "pass_at_k",
    "register_advantage_estimator",
    "reinforce_plus_plus",
    "remax",
    "rloo",
    "turn_level",
]
