"""Which groups teach something: those whose rollouts got different scores.

One rule serves the zero-variance filter and dynamic sampling. A group has no spread if at least two of its live rows
are left and their scores lie within a tolerance of each other; with one row or none there is nothing to compare, and
the group counts as good as long as a row is left. Groups are numbered in the order of their first rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from skyrl.algorithms.groups import number_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpread:
    """How far apart the scores of each group lie."""

    index: Int[Tensor, " batch"]
    """The group of each row."""
    num_live: Int[Tensor, " groups"]
    """Live rows of each group."""
    spread: Float[Tensor, " groups"]
    """Largest minus least live score, float64; 0 where there is none."""

    @classmethod
    def join(cls, parts: Sequence[GroupSpread]) -> GroupSpread:
        """Put batches one after the other; their groups stay apart."""
        starts = np.cumsum([0, *(len(part.spread) for part in parts[:-1])]).tolist()
        return cls(
            index=torch.cat([part.index + start for part, start in zip(parts, starts, strict=True)]),
            num_live=torch.cat([part.num_live for part in parts]),
            spread=torch.cat([part.spread for part in parts]),
        )

    def is_flat(self, tol: float) -> Bool[Tensor, " groups"]:
        """Say which groups have at least two live rows and a spread of at most `tol`."""
        return (self.num_live > 1) & (self.spread <= tol)

    def is_good(self, tol: float) -> Bool[Tensor, " groups"]:
        """Say which groups have a live row and are not flat."""
        return (self.num_live > 0) & ~self.is_flat(tol)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Rows to train on, group by group; a row may be there several times."""

    rows: list[int]
    """Rows of the batch."""
    uids: list[str]
    """Their uids; the second copy of group `a` is called `a#dup1`."""


def group_spread(
    scores: Float[Tensor, " batch"], live: Bool[Tensor, " batch"], uids: Sequence[str] | np.ndarray
) -> GroupSpread:
    """Measure the spread of each group over its live rows; what a dead row holds does not matter.

    Raises:
        ValueError: A live score is NaN or infinite; names the row. Or shapes differ.
    """
    index, num_groups = number_groups(uids)
    for name, shape in {"live": tuple(live.shape), "uids": tuple(index.shape)}.items():
        if shape != tuple(scores.shape):
            raise ValueError(f"{name} has shape {shape} but scores has shape {tuple(scores.shape)}; they must agree")
    scores = scores.double()
    broken = (live & ~scores.isfinite()).nonzero()
    if len(broken):
        row = int(broken[0])
        raise ValueError(f"the score of row {row} (uid {uids[row]!r}) is {float(scores[row])}, not a finite number")
    least, most = scores.new_full((num_groups,), torch.inf), scores.new_full((num_groups,), -torch.inf)
    least.scatter_reduce_(0, index, torch.where(live, scores, torch.inf), "amin")
    most.scatter_reduce_(0, index, torch.where(live, scores, -torch.inf), "amax")
    num_live = torch.zeros(num_groups, dtype=torch.long).index_add_(0, index, live.long())
    return GroupSpread(index=index, num_live=num_live, spread=torch.where(num_live > 0, most - least, 0.0))


def zero_variance_rows(
    scores: Float[Tensor, " batch"],
    live: Bool[Tensor, " batch"],
    uids: Sequence[str] | np.ndarray,
    tol: float = 1e-6,
) -> tuple[Bool[Tensor, " batch"], int]:
    """Find the groups whose live scores do not differ by more than `tol`.

    Args:
        scores: Sum of each row's rewards.
        live: Rows that train: those with a trained token.
        uids: The prompt of each row, in any order.
        tol: Largest spread that counts as none.

    Returns:
        True for every row of such a group, and the number of such groups.
    """
    groups = group_spread(scores, live, uids)
    flat = groups.is_flat(tol)
    return flat[groups.index], int(flat.sum())


def zero_variance_filter(rewards: Sequence[float], uids: Sequence[str], tol: float = 1e-6) -> list[int]:
    """Return the rows of the groups whose rewards differ by more than `tol`, and of groups of one.

    Upstream's form of `zero_variance_rows`: every row counts as live.
    """
    scores = torch.tensor(list(rewards), dtype=torch.float64)
    flat, _ = zero_variance_rows(scores, torch.ones(len(scores), dtype=torch.bool), uids, tol)
    rows: list[int] = (~flat).nonzero().flatten().tolist()
    return rows


def select_good(groups: GroupSpread, uids: Sequence[str], *, tol: float, limit: int | None = None) -> Selection:
    """Keep the rows of the good groups, the first `limit` of them (DAPO's filter, arXiv:2503.14476, eq. 11)."""
    kept = groups.is_good(tol).nonzero().flatten()[:limit]
    rows = rows_of_groups(groups.index, kept).tolist()
    return Selection(rows=rows, uids=[uids[row] for row in rows])


def replace_flat(
    groups: GroupSpread, uids: Sequence[str], *, tol: float, min_ratio: float, seed: int
) -> Selection | None:
    """Put a copy of a good group in the place of each other group.

    Copies are drawn without replacement while there are enough good groups, else with it.

    Args:
        groups: Of the batch.
        uids: The prompt of each row.
        tol: Largest spread that counts as none.
        min_ratio: Share of good groups that must be exceeded.
        seed: Of the draw.

    Returns:
        As many groups as there were, or None when good groups are too few.
    """
    good = groups.is_good(tol)
    candidates, others = good.nonzero().flatten(), (~good).nonzero().flatten()
    if len(candidates) == 0 or len(candidates) <= len(good) * min_ratio:
        return None
    generator = torch.Generator().manual_seed(seed)
    if len(candidates) >= len(others):
        drawn = torch.randperm(len(candidates), generator=generator)[: len(others)]
    else:
        drawn = torch.randint(len(candidates), (len(others),), generator=generator)
    source = torch.arange(len(good))
    source[others] = candidates[drawn]
    rows = rows_of_groups(groups.index, source).tolist()
    return Selection(rows=rows, uids=_fresh_uids(groups, uids, good.tolist(), source.tolist(), rows))


def rows_of_groups(index: Int[Tensor, " batch"], groups: Int[Tensor, " chosen"]) -> Int[Tensor, " rows"]:
    """Return the rows of the chosen groups, one group after the other; a group may be chosen several times."""
    if len(groups) == 0:
        return torch.zeros(0, dtype=torch.long)
    by_group = index.argsort(stable=True)
    sizes = index.bincount()
    first = (sizes.cumsum(0) - sizes)[groups]
    lengths = sizes[groups]
    start = lengths.cumsum(0) - lengths
    return by_group[torch.arange(int(lengths.sum())) + (first - start).repeat_interleave(lengths)]


def _fresh_uids(
    groups: GroupSpread, uids: Sequence[str], good: list[bool], source: list[int], rows: list[int]
) -> list[str]:
    """Name the rows of each place: a good group keeps its uid, its copies get a suffix."""
    copies: Counter[int] = Counter()
    suffixes = []
    for kept, group in zip(good, source, strict=True):
        copies[group] += not kept
        suffixes.append("" if kept else f"#dup{copies[group]}")
    sizes = groups.index.bincount()[torch.tensor(source)]
    places = torch.arange(len(source)).repeat_interleave(sizes).tolist()
    return [f"{uids[row]}{suffixes[place]}" for row, place in zip(rows, places, strict=True)]
