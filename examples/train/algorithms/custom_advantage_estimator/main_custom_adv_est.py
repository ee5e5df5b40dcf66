"""python -m examples.train.algorithms.custom_advantage_estimator.main_custom_adv_est key=value ...

Registers an advantage estimator, then trains as the quickstart's entry point does: `BasePPOExp` through `run_hydra`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from examples.train.quickstart.main_quickstart import main
from skyrl.backends.skyrl_train.utils.ppo_utils import register_advantage_estimator


@register_advantage_estimator("simple_baseline")
def simple_baseline(token_level_rewards: Tensor, response_mask: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """A = a rollout's score minus the mean score of the batch, on every response token.

    One baseline for all prompts, so that easy ones get positive advantages and hard ones negative: groups (`index`
    in `kwargs`) play no part. Failed rollouts are no rows here, because the function does not name `valid_rows`.

    Args:
        token_level_rewards: (batch, response).
        response_mask: (batch, response), 1 = after the prompt.
        kwargs: Whatever else estimators are offered.

    Returns:
        Advantages and returns, which are the same here, shaped like the rewards.
    """
    inside = response_mask.bool()
    scores = torch.where(inside, token_level_rewards, 0.0).sum(dim=-1, keepdim=True)
    advantages = torch.where(inside, scores - scores.mean(), 0.0)
    return advantages, advantages


if __name__ == "__main__":
    main()
