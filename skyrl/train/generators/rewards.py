"""The two forms of a reward: one number, or one per token."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import numpy as np
from typing_extensions import TypeIs


def is_scalar(reward: float | Sequence[float]) -> TypeIs[float]:
    """Say whether a reward is one number (numpy's included)."""
    return isinstance(reward, Real)


def total_reward(reward: float | Sequence[float]) -> float:
    """Return the reward of a rollout, per-token rewards summed."""
    return float(np.sum(reward))
