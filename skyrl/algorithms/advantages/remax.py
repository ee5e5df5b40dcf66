"""ReMax: a rollout against the greedy one of its prompt."""

from __future__ import annotations

import logging
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from skyrl.algorithms.advantages.checks import refuse_non_finite
from skyrl.algorithms.advantages.outcome import row_scores, shown_tokens, spread_over_tokens
from skyrl.algorithms.advantages.registry import register_advantage_estimator

logger = logging.getLogger(__name__)


@register_advantage_estimator("remax", needs_baseline=True, replaceable=True)
def remax_advantages(
    token_level_rewards: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    baseline_scores: Float[Tensor, " batch"],
    *,
    valid_rows: Bool[Tensor, " batch"] | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """A_i = s_i - s_greedy: one more rollout of each prompt, at temperature 0, is the baseline (arXiv:2310.10505).

    A NaN in `baseline_scores` says that the greedy rollout failed: the rows of that prompt get 0, with a
    warning. Returns equal advantages.

    Raises:
        ValueError: A baseline or an unmasked reward is infinite.
    """
    shown = shown_tokens(response_mask, valid_rows)
    scores = row_scores(token_level_rewards, shown).double()
    valid = torch.ones_like(scores, dtype=torch.bool) if valid_rows is None else valid_rows
    missing = baseline_scores.isnan()
    refuse_non_finite("baseline_scores", baseline_scores, valid & ~missing)
    num_missing = int((valid & missing).sum())
    if num_missing:
        logger.warning("remax: the greedy rollout of %d rows failed; their advantage is 0", num_missing)
    advantage = torch.where(valid & ~missing, scores - baseline_scores, 0.0)
    advantages = spread_over_tokens(advantage, token_level_rewards, shown)
    return advantages, advantages
