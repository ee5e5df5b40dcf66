"""Turn-level advantages: each turn against the same turn of the group's other rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from skyrl.algorithms.advantages.discount import discounted_sums
from skyrl.algorithms.advantages.outcome import shown_tokens
from skyrl.algorithms.advantages.registry import register_advantage_estimator
from skyrl.algorithms.groups import group_index, group_stats
from skyrl.algorithms.masked import hide, row_blocks


@register_advantage_estimator("turn_level", outcome=False, replaceable=True)
def turn_level_advantages(
    token_level_rewards: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    index: Sequence[str] | np.ndarray,
    *,
    grpo_norm_by_std: bool = True,
    gamma: float = 1.0,
    epsilon: float = 1e-6,
    loss_mask: Shaped[Tensor, "batch response"] | None = None,
    valid_rows: Bool[Tensor, " batch"] | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """A_ik = G_ik - mean of G_jk over the group's rows that have a turn k (after arXiv:2505.11821).

    Turn k is the k-th run of loss mask 1 (of the response mask, without a loss mask). Its reward r_k is all that
    falls inside it and up to the next turn; what comes before the first turn belongs to none. To go:
    G_k = Σ_{j≥k} γ^{j-k}·r_j, so γ discounts per turn here. `grpo_norm_by_std` divides by (std + ε), ddof 1. A
    turn that one row of the group has gets 0. All tokens of a turn share its advantage; returns equal advantages.
    """
    rewarded = shown_tokens(response_mask, valid_rows)
    runs = _find_runs(rewarded if loss_mask is None else shown_tokens(loss_mask, valid_rows))
    rewards = _rewards_of_turns(runs, token_level_rewards, rewarded)
    turns = runs.trained.nonzero().squeeze(-1)
    row, number = runs.row[turns], _number_in_row(runs.row[turns], token_level_rewards.shape[0])
    num_turns = int(number.max()) + 1 if len(number) else 1
    table = rewards.new_zeros(token_level_rewards.shape[0], num_turns)
    table[row, number] = rewards
    to_go = discounted_sums(table, float(gamma))[row, number]
    groups, num_groups = group_index(index)
    stats = group_stats(to_go, groups.to(row.device)[row] * num_turns + number, num_groups * num_turns)
    advantage = stats.centred / (stats.std + epsilon) if grpo_norm_by_std else stats.centred
    advantages = _spread_over_runs(runs, token_level_rewards, turns, advantage)
    return advantages, advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """Stretches of tokens of one row with the same mask, in the order of the batch; they cover it without a gap."""

    row: Int[Tensor, " runs"]
    length: Int[Tensor, " runs"]
    trained: Bool[Tensor, " runs"]
    """A turn; others are padding, observations, or rows without trained tokens."""
    leads: Bool[Tensor, " runs"]
    """The first run of its row."""

    def in_blocks(self, like: Tensor) -> Iterator[tuple[slice, slice]]:
        """Cut the batch into blocks of rows, each with its runs."""
        for rows in row_blocks(like):
            first, last = torch.searchsorted(self.row, torch.tensor([rows.start, rows.stop], device=self.row.device))
            yield rows, slice(int(first), int(last))


def _find_runs(shown: Bool[Tensor, "batch response"]) -> _Runs:
    begins = torch.ones_like(shown)
    torch.ne(shown[:, 1:], shown[:, :-1], out=begins[:, 1:])
    start = begins.reshape(-1).nonzero().squeeze(-1)
    width = shown.shape[1]
    return _Runs(
        row=start // width,
        length=torch.diff(start, append=start.new_tensor([shown.numel()])),
        trained=shown.reshape(-1)[start],
        leads=start % width == 0,
    )


def _rewards_of_turns(
    runs: _Runs, rewards: Float[Tensor, "batch response"], rewarded: Bool[Tensor, "batch response"]
) -> Float[Tensor, " turns"]:
    """Return what was earned inside each turn and after it, before the next one."""
    of_run = torch.empty(len(runs.row), dtype=torch.float64, device=rewards.device)
    for rows, part in runs.in_blocks(rewards):
        earned = hide(rewards[rows], rewarded[rows]).reshape(-1).cumsum(-1, dtype=torch.float64)
        of_run[part] = torch.diff(earned[runs.length[part].cumsum(-1) - 1], prepend=earned.new_zeros(1))
    before_turns = runs.leads & ~runs.trained
    turn_of_run = (runs.trained.cumsum(-1) - 1).clamp(min=0)
    total = of_run.new_zeros(int(runs.trained.sum()) or 1)
    return total.index_add_(0, turn_of_run, hide(of_run, ~before_turns))[: int(runs.trained.sum())]


def _number_in_row(row: Int[Tensor, " turns"], num_rows: int) -> Int[Tensor, " turns"]:
    """Count the turns of each row from 0."""
    turns_of_row = torch.bincount(row, minlength=num_rows)
    first = turns_of_row.cumsum(-1) - turns_of_row
    return torch.arange(len(row), device=row.device) - first[row]


def _spread_over_runs(
    runs: _Runs,
    like: Float[Tensor, "batch response"],
    turns: Int[Tensor, " turns"],
    advantage: Float[Tensor, " turns"],
) -> Float[Tensor, "batch response"]:
    """Repeat the advantage of a turn on its tokens, zeros elsewhere, in the type of `like`."""
    of_run = torch.zeros(len(runs.row), dtype=like.dtype, device=like.device)
    of_run[turns] = advantage.to(like.dtype)
    result = torch.empty_like(like)
    for rows, part in runs.in_blocks(like):
        block = result[rows]
        tokens = torch.repeat_interleave(of_run[part], runs.length[part], output_size=block.numel())
        block.copy_(tokens.view_as(block))
    return result
