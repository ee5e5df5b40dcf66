"""Statistics of groups: the rollouts of one prompt share a uid, wherever they stand in the batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def number_groups(uids: Sequence[Hashable] | np.ndarray | Tensor) -> tuple[Int[Tensor, " batch"], int]:
    """Number the groups in the order of their first rows; return the group of each row, and how many there are.

    A uid is anything hashable.

    Raises:
        ValueError: A row has no uid (None): it would be put into one group with all such rows.
    """
    names = uids.tolist() if isinstance(uids, np.ndarray | Tensor) else uids
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    if None in numbers:
        raise ValueError(f"row {list(names).index(None)} has no uid (None); name the prompt of every row")
    return torch.tensor(list(map(numbers.__getitem__, names)), dtype=torch.int64), len(numbers)


def group_index(
    uids: Sequence[Hashable] | np.ndarray, valid_rows: Bool[Tensor, " batch"] | None = None
) -> tuple[Int[Tensor, " batch"], int]:
    """Number the groups.

    Args:
        uids: The uid of each row.
        valid_rows: False marks a failed rollout. All of these make one more group, the last, whatever their uids,
            so that they are in nobody's statistics.

    Returns:
        The group of each row, from 0, and how many groups there are.
    """
    groups, count = number_groups(uids)
    if valid_rows is None:
        return groups, count
    return torch.where(valid_rows, groups.to(valid_rows.device), count), count + 1


def group_sum(
    values: Float[Tensor, " batch"], groups: Int[Tensor, " batch"], num_groups: int
) -> Float[Tensor, " groups"]:
    """Add the values of each group."""
    return torch.zeros(num_groups, dtype=values.dtype, device=values.device).index_add_(0, groups, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """Size, mean and spread of a score, repeated for every row of the group; all in float64."""

    size: Float[Tensor, " batch"]
    """Rows in the group."""
    mean: Float[Tensor, " batch"]
    """Mean of the group."""
    centred: Float[Tensor, " batch"]
    """Score minus the mean of the group; exactly 0 in a group of equal scores."""
    std: Float[Tensor, " batch"]
    """Sample standard deviation (ddof 1); 0 for a group of one."""


def group_stats(scores: Float[Tensor, " batch"], groups: Int[Tensor, " batch"], num_groups: int) -> GroupStats:
    """Compute the statistics in float64, from scores relative to the least of their group.

    Args:
        scores: Finite.
        groups: The group of each row, as `group_index` numbers them.
        num_groups: More than the highest number; groups without rows do no harm.
    """
    groups = groups.to(scores.device)
    scores = scores.double()
    least = scores.new_zeros(num_groups).scatter_reduce_(0, groups, scores, "amin", include_self=False)[groups]
    above = scores - least
    size = group_sum(torch.ones_like(scores), groups, num_groups)[groups]
    offset = group_sum(above, groups, num_groups)[groups] / size
    centred = above - offset
    variance = group_sum(centred.square(), groups, num_groups)[groups] / (size - 1).clamp(min=1.0)
    return GroupStats(size=size, mean=least + offset, centred=centred, std=variance.sqrt())
