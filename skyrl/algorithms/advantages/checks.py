"""Refuse bad input of estimators with an error that names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from skyrl.algorithms.signatures import require_shape


def require_batch_shapes(
    rewards: Float[Tensor, "batch response"],
    index: Sequence[str] | np.ndarray,
    *,
    tokens: Mapping[str, Tensor | None],
    rows: Mapping[str, Tensor | None],
) -> None:
    """Refuse what does not fit the rewards.

    Args:
        rewards: Must have two dimensions.
        index: One entry a row.
        tokens: Tensors that must be shaped like the rewards, by name.
        rows: Tensors that must have one entry a row, by name.

    Raises:
        ValueError: Names the tensor and both shapes.
    """
    shape = tuple(rewards.shape)
    if rewards.dim() != 2:
        raise ValueError(f"token_level_rewards has shape {shape}; it must be (batch, response)")
    for name, tensor in tokens.items():
        if tensor is not None:
            require_shape(name, tensor, "token_level_rewards", rewards)
    for name, tensor in rows.items():
        if tensor is not None and tuple(tensor.shape) != shape[:1]:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} but token_level_rewards has shape {shape}; "
                f"it must have one entry a row: {shape[:1]}"
            )
    if len(index) != shape[0]:
        raise ValueError(f"index has {len(index)} entries but token_level_rewards has shape {shape}")


def refuse_non_finite(name: str, tensor: Shaped[Tensor, "batch ..."], shown: Bool[Tensor, "batch ..."]) -> None:
    """Refuse NaN and infinities where `shown` is true.

    Raises:
        ValueError: Names the tensor, the first row and the value there.
    """
    bad = (shown & ~tensor.isfinite()).reshape(tensor.shape[0], -1)
    if not bool(bad.any()):
        return
    row = int(bad.any(dim=-1).nonzero()[0])
    value = tensor.reshape(bad.shape)[row][bad[row]][0].item()
    raise ValueError(f"{name} holds {value} in row {row}, which is neither masked nor marked as failed")
