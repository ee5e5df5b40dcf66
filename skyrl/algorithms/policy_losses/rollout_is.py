"""REINFORCE with importance ratios to the sampler, zero outside a range."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide, masked_mean, weighted_sum
from skyrl.algorithms.mean import MetricValue
from skyrl.algorithms.policy_losses.ratio import importance_ratio
from skyrl.algorithms.policy_losses.registry import register_policy_loss
from skyrl.algorithms.score_centering import SamplerHead, expected_score
from skyrl.config.algorithm import AlgorithmConfig


@register_policy_loss("rollout_is", needs_old_logprobs=False, needs_rollout_logprobs=True, anchored=True)
def rollout_is_loss(
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
    """L = -f(ρ)·A·ℓ with ρ = exp(log_probs - rollout_logprobs), and f(x) = x inside (1 - ε_low, 1 + ε_high), else 0.

    As in GLM-5, arXiv:2602.15763. f(ρ) carries no gradient; a ratio on the bound counts as outside. Log-probs are in
    nats. `loss_weights` hold the loss reduction (`loss_reduction.py`), so the sum over a mini-batch is the final loss;
    None sums plainly. With `topk` and `score_centering.enabled` the score is centred (`score_centering.py`), with
    c = f of each token's own ratio.

    Returns:
        The scalar loss, and `clip_ratio`: share of trained tokens whose ratio is outside.

    Raises:
        ValueError: `rollout_logprobs` is missing.
    """
    if rollout_logprobs is None:
        raise ValueError("policy loss 'rollout_is' needs rollout_logprobs; set generator.sampling_params.logprobs=1")
    low, high = 1 - config.eps_clip_low, 1 + config.eps_clip_high

    def inside(ratio: Tensor) -> Tensor:
        return torch.where((ratio > low) & (ratio < high), ratio, 0.0)

    log_probs = hide(log_probs, loss_mask)
    ratio = inside(importance_ratio(log_probs.detach(), rollout_logprobs, loss_mask))
    score = ratio * log_probs
    metrics: dict[str, MetricValue] = {"clip_ratio": masked_mean((ratio == 0).float(), loss_mask)}
    if topk is not None and config.score_centering.enabled:
        expected, own = expected_score(
            topk,
            log_probs,
            rollout_logprobs,
            advantages,
            loss_mask,
            config,
            lambda now, sampler: inside(importance_ratio(now, sampler, None)),
        )
        score, metrics = score - expected, metrics | own
    return weighted_sum(-hide(advantages, loss_mask) * score, loss_mask, loss_weights), metrics
