"""REINFORCE: the plain policy gradient."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide, weighted_sum
from skyrl.algorithms.mean import MetricValue
from skyrl.algorithms.policy_losses.ratio import at_least_float32
from skyrl.algorithms.policy_losses.registry import register_policy_loss
from skyrl.algorithms.score_centering import SamplerHead, expected_score
from skyrl.config.algorithm import AlgorithmConfig


@register_policy_loss("reinforce", needs_old_logprobs=False, replaceable=True)
def reinforce_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"] | None,
    advantages: Float[Tensor, "batch response"],
    config: AlgorithmConfig,
    loss_mask: Shaped[Tensor, "batch response"] | None = None,
    rollout_logprobs: Float[Tensor, "batch response"] | None = None,
    *,
    loss_weights: Float[Tensor, "batch response"] | None = None,
    topk: SamplerHead | None = None,
) -> tuple[Float[Tensor, ""], dict[str, MetricValue]]:
    """REINFORCE: L = -A·ℓ, without ratio and clip (Williams, Machine Learning 8, 1992, section 5).

    Log-probs are in nats. `loss_weights` hold the loss reduction (`loss_reduction.py`), so the sum over a mini-batch
    is the final loss; None sums plainly. With `topk` and `score_centering.enabled` the score is centred
    (`score_centering.py`), with c = 1 for every token; that reads `rollout_logprobs`.

    Returns:
        The scalar loss, and `clip_ratio`, which is 0.
    """
    score = at_least_float32(hide(log_probs, loss_mask))
    metrics: dict[str, MetricValue] = {"clip_ratio": log_probs.new_zeros(())}
    if topk is not None and config.score_centering.enabled:
        expected, own = expected_score(
            topk, score, rollout_logprobs, advantages, loss_mask, config, lambda now, sampler: torch.ones_like(now)
        )
        score, metrics = score - expected, metrics | own
    return weighted_sum(-hide(advantages, loss_mask) * score, loss_mask, loss_weights), metrics
