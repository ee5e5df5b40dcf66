"""Statistics of groups: the rollouts of one prompt share a uid, wherever they stand in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


def group_index(uids: Sequence[str] | np.ndarray) -> tuple[Int[Tensor, " batch"], int]:
    """Number the groups.

    Returns:
        The group of each row, from 0, and how many groups there are.
    """
    names, index = np.unique(np.asarray(uids), return_inverse=True)
    return torch.from_numpy(index.reshape(-1).astype(np.int64)), len(names)


def group_sum(
    values: Float[Tensor, " batch"], groups: Int[Tensor, " batch"], num_groups: int
) -> Float[Tensor, " groups"]:
    """Add the values of each group."""
    return torch.zeros(num_groups, dtype=values.dtype, device=values.device).index_add_(0, groups, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """Size, mean and spread of a score, repeated for every row of the group."""

    size: Float[Tensor, " batch"]
    """Rows in the group."""
    centred: Float[Tensor, " batch"]
    """Score minus the mean of the group; exactly 0 in a group of equal scores."""
    std: Float[Tensor, " batch"]
    """Sample standard deviation (ddof 1); 0 for a group of one."""


def group_stats(scores: Float[Tensor, " batch"], uids: Sequence[str] | np.ndarray) -> GroupStats:
    """Compute the statistics in float64, from scores relative to the least of their group."""
    groups, num_groups = group_index(uids)
    groups = groups.to(scores.device)
    scores = scores.double()
    least = scores.new_zeros(num_groups).scatter_reduce_(0, groups, scores, "amin", include_self=False)
    above = scores - least[groups]
    size = group_sum(torch.ones_like(scores), groups, num_groups)
    centred = above - (group_sum(above, groups, num_groups) / size)[groups]
    variance = group_sum(centred.square(), groups, num_groups) / (size - 1).clamp(min=1.0)
    return GroupStats(size=size[groups], centred=centred, std=variance.sqrt()[groups])
