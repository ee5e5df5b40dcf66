"""Soft overlong punishment: long responses lose reward before the length limit cuts them off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from skyrl.algorithms.signatures import require_shape
from skyrl.errors import ConfigError


def overlong_penalty(
    lengths: Int[Tensor, " batch"], *, max_len: int, buffer_len: int, factor: float = 1.0
) -> tuple[Float[Tensor, " batch"], Bool[Tensor, " batch"]]:
    """Compute what each response loses (DAPO, arXiv:2503.14476, eq. 13).

    Args:
        lengths: Response tokens.
        max_len: The limit L in tokens.
        buffer_len: Tokens before the limit in which the penalty grows from 0 to `factor`.
        factor: Penalty at the limit.

    Returns:
        The penalty, float64, and which responses exceed the limit: those lose all their reward instead.

    Raises:
        ConfigError: The buffer has no tokens.
    """
    if buffer_len <= 0:
        raise ConfigError(
            f"trainer.algorithm.overlong_buffer_len={buffer_len} must be at least 1 token; "
            "null turns the punishment off"
        )
    exceeded = (lengths - (max_len - buffer_len)).double()
    beyond = lengths > max_len
    return torch.where(beyond, 0.0, exceeded.clamp(min=0.0) / buffer_len * factor), beyond


def punish_overlong(
    rewards: Sequence[Any], lengths: Sequence[int], *, max_len: int, buffer_len: int, factor: float = 1.0
) -> list[Any]:
    """Return the rewards after the punishment; what came in stays as it is.

    Args:
        rewards: One number, or one list per token, for each response. In a list the last token pays.
        lengths: Response tokens.
        max_len: See `overlong_penalty`, also for the others.
        buffer_len: Tokens.
        factor: Penalty at the limit.
    """
    counts = torch.tensor(list(lengths), dtype=torch.long)
    require_shape("rewards", torch.empty(len(rewards)), "lengths", counts)
    penalties, beyond = overlong_penalty(counts, max_len=max_len, buffer_len=buffer_len, factor=factor)
    rows = zip(rewards, penalties.tolist(), beyond.tolist(), strict=True)
    return [_punished(reward, penalty, lost) for reward, penalty, lost in rows]


def _punished(reward: Any, penalty: float, lost: bool) -> Any:
    if not lost and penalty == 0.0:
        return reward
    if np.ndim(reward) == 0:
        return 0.0 if lost else reward - penalty
    if lost or len(reward) == 0:
        return [0.0] * len(reward)
    return [*reward[:-1], reward[-1] - penalty]
