"""What happens to rollouts that did not end by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl.train.generators.rewards import is_scalar
from skyrl.types.rollout import classify_stop_reason


def apply_overlong_filtering(loss_masks: Sequence[Sequence[int]], stop_reasons: Sequence[str]) -> list[list[int]]:
    """Return masks that are all zero for truncated and failed rows; the input stays as it is."""
    if len(loss_masks) != len(stop_reasons):
        raise AssertionError(f"{len(loss_masks)} loss masks for {len(stop_reasons)} stop reasons")
    return [
        list(mask) if classify_stop_reason(reason) == "finished" else [0] * len(mask)
        for mask, reason in zip(loss_masks, stop_reasons, strict=True)
    ]


def zero_rewards_on_non_stop(
    rewards: Sequence[float] | Sequence[Sequence[float]], stop_reasons: Sequence[str]
) -> list[float] | list[list[float]]:
    """Return rewards that are zero, in the same form, for truncated and failed rows."""
    if len(rewards) != len(stop_reasons):
        raise AssertionError(f"{len(rewards)} rewards for {len(stop_reasons)} stop reasons")
    pairs: list[tuple[Any, str]] = list(zip(rewards, stop_reasons, strict=True))
    return [reward if classify_stop_reason(reason) == "finished" else _zero_like(reward) for reward, reason in pairs]


def _zero_like(reward: float | Sequence[float]) -> Any:
    return 0.0 if is_scalar(reward) else [0.0] * len(reward)
