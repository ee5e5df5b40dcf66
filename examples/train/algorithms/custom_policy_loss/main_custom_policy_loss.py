"""python -m examples.train.algorithms.custom_policy_loss.main_custom_policy_loss key=value ...

Registers a policy loss, then trains as the quickstart's entry point does: `BasePPOExp` through `run_hydra`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from examples.train.quickstart.main_quickstart import main
from skyrl.backends.skyrl_train.utils.ppo_utils import masked_mean, register_policy_loss
from skyrl.config.algorithm import AlgorithmConfig


@register_policy_loss("reinforce")
def reinforce_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: AlgorithmConfig,
    loss_mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -Σ A·log π over the trained tokens of a micro-batch: the policy gradient without ratio and clip.

    A sum, not a mean: the function does not name `loss_weights`, so the advantages come with the loss reduction
    multiplied in. All tensors are (batch, response).

    Returns:
        The scalar loss, and `chosen_log_prob`: mean log-prob of the trained tokens, in nats.
    """
    mask = torch.ones_like(log_probs) if loss_mask is None else loss_mask
    # What the mask hides may be NaN or infinite: keep it out of the gradient, too.
    advantages = torch.where(mask.bool(), advantages, 0.0)
    loss = -(advantages * torch.where(mask.bool(), log_probs, 0.0)).sum()
    return loss, {"chosen_log_prob": masked_mean(log_probs, mask).detach()}


if __name__ == "__main__":
    main()
