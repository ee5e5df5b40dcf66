"""What estimators share that give a whole rollout one advantage."""

from __future__ import annotations

from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide


def row_scores(
    token_level_rewards: Float[Tensor, "batch response"], response_mask: Shaped[Tensor, "batch response"]
) -> Float[Tensor, " batch"]:
    """Return the sum of each row's rewards on response tokens."""
    return hide(token_level_rewards, response_mask).sum(dim=-1)


def spread_over_tokens(
    advantage: Float[Tensor, " batch"],
    like: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
) -> Float[Tensor, "batch response"]:
    """Repeat a row's advantage on its response tokens, zeros elsewhere, in the type of `like`."""
    return hide(advantage.to(like.dtype).unsqueeze(-1), response_mask)
