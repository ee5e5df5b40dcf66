"""What estimators share: which tokens count, the score of a rollout, and one advantage for all its tokens."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from skyrl.algorithms.advantages.checks import refuse_non_finite
from skyrl.algorithms.masked import hide, row_blocks


def shown_tokens(
    mask: Shaped[Tensor, "batch response"], valid_rows: Bool[Tensor, " batch"] | None = None
) -> Bool[Tensor, "batch response"]:
    """Return where the mask is not zero and the rollout did not fail."""
    shown = mask.to(torch.bool, copy=True)
    if valid_rows is not None:
        shown.index_fill_(0, (~valid_rows).nonzero().squeeze(-1), False)
    return shown


def row_scores(
    token_level_rewards: Float[Tensor, "batch response"], shown: Bool[Tensor, "batch response"]
) -> Float[Tensor, " batch"]:
    """Return the sum of each row's shown rewards.

    Raises:
        ValueError: A shown reward is not finite.
    """
    scores = token_level_rewards.new_empty(token_level_rewards.shape[0])
    for rows in row_blocks(token_level_rewards):
        scores[rows] = hide(token_level_rewards[rows], shown[rows]).sum(dim=-1)
    if not bool(scores.isfinite().all()):
        refuse_non_finite("token_level_rewards", token_level_rewards, shown)
    return scores


def row_counts(mask: Shaped[Tensor, "batch response"]) -> Float[Tensor, " batch"]:
    """Return how many tokens of each row a mask of zeros and ones shows."""
    counts = torch.empty(mask.shape[0], device=mask.device)
    for rows in row_blocks(mask):
        counts[rows] = mask[rows].float().sum(dim=-1)
    return counts


def spread_over_tokens(
    advantage: Float[Tensor, " batch"],
    like: Float[Tensor, "batch response"],
    shown: Bool[Tensor, "batch response"],
) -> Float[Tensor, "batch response"]:
    """Repeat a row's advantage, which is finite, on its shown tokens, zeros elsewhere, in the type of `like`."""
    advantage = advantage.to(like.dtype).unsqueeze(-1)
    result = torch.empty_like(like)
    for rows in row_blocks(like):
        block = result[rows]
        block.copy_(shown[rows].view(torch.uint8)).mul_(advantage[rows])  # faster than a choice by the mask
    return result


def row_mean(values: Float[Tensor, " batch"], valid_rows: Bool[Tensor, " batch"] | None) -> Float[Tensor, ""]:
    """Return the mean over rows that did not fail; 0 without any."""
    return values[_kept(values, valid_rows)].sum() / _kept(values, valid_rows).sum().clamp(min=1)


def row_std(values: Float[Tensor, " batch"], valid_rows: Bool[Tensor, " batch"] | None) -> Float[Tensor, ""]:
    """Return the sample standard deviation (ddof 1) over rows that did not fail; 0 for fewer than two."""
    kept = _kept(values, valid_rows)
    squares = (values[kept] - row_mean(values, valid_rows)).square().sum()
    return (squares / (kept.sum() - 1).clamp(min=1)).sqrt()


def _kept(values: Tensor, valid_rows: Tensor | None) -> Tensor:
    return torch.ones_like(values, dtype=torch.bool) if valid_rows is None else valid_rows
