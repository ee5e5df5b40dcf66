"""Clip-Cov: cut the gradient of a few tokens whose covariance is high."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide, masked_mean, weighted_sum
from skyrl.algorithms.policy_losses.clipped_ratio import pessimistic_ratio
from skyrl.algorithms.policy_losses.covariance import token_covariance
from skyrl.algorithms.policy_losses.ratio import as_numbers, at_least_float32, importance_ratio
from skyrl.algorithms.policy_losses.registry import register_policy_loss
from skyrl.config.algorithm import AlgorithmConfig

_LOW_31_BITS = 0x7FFFFFFF


@register_policy_loss("clip_cov", correctable=False)
def clip_cov_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    config: AlgorithmConfig,
    loss_mask: Shaped[Tensor, "batch response"] | None = None,
    rollout_logprobs: Float[Tensor, "batch response"] | None = None,
    *,
    loss_weights: Float[Tensor, "batch response"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Clip-Cov: `regular`, and a few tokens of high covariance drawn at random have loss 0 (arXiv:2505.22617).

    Drawn are floor(`clip_cov.clip_ratio` times the trained tokens), at least one, among the trained tokens that
    the clip leaves alone and whose covariance is between `clip_cov_lb` and `clip_cov_ub`. The draw depends on
    the values alone (see `shuffle_keys`). Log-probs are in nats; for `loss_weights` see `regular`.

    Returns:
        The scalar loss, and `clip_ratio`: share of trained tokens that were drawn.
    """
    trained = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask.bool()
    advantages = at_least_float32(hide(advantages, trained))
    ratio, clipped = pessimistic_ratio(importance_ratio(log_probs, old_log_probs, loss_mask), advantages, config)
    with torch.no_grad():
        shown = at_least_float32(hide(log_probs, trained))
        covariance = token_covariance(shown, advantages, trained)
        inside = (covariance > config.clip_cov.clip_cov_lb) & (covariance < config.clip_cov.clip_cov_ub)
        drawn = _draw(inside & trained & (clipped == 0), trained, shown, config.clip_cov.clip_ratio)
        drawn = as_numbers(drawn, ratio)
        pull = (drawn - 1) * advantages
    loss = weighted_sum(ratio * pull, loss_mask, loss_weights)
    return loss, {"clip_ratio": masked_mean(drawn, loss_mask)}


def _draw(
    candidates: Bool[Tensor, "batch response"],
    trained: Bool[Tensor, "batch response"],
    log_probs: Float[Tensor, "batch response"],
    share: float,
) -> Bool[Tensor, "batch response"]:
    """Draw max(1, floor(share · trained tokens)) of the candidates, or all where they are fewer.

    The count stays on the device: the top `share` of all cells are sorted, and ranks past the count are not drawn.
    """
    no_candidate = (~candidates).view(torch.uint8).long()
    keys = shuffle_keys(log_probs).add_(no_candidate, alpha=_LOW_31_BITS + 1).flatten()
    lowest, cells = keys.topk(min(max(1, int(share * keys.numel())), keys.numel()), largest=False)
    count = (share * trained.sum().double()).floor().clamp(min=1)
    ranks = torch.arange(lowest.numel(), device=keys.device)
    chosen = (ranks < count) & (lowest <= _LOW_31_BITS)
    return torch.zeros_like(keys, dtype=torch.bool).scatter(0, cells, chosen).view_as(candidates)


def shuffle_keys(log_probs: Float[Tensor, "batch response"]) -> Int[Tensor, "batch response"]:
    """Hash each token to 31 bits by its own log-prob, all log-probs of its row, and its distance from the right.

    Ordering tokens by it shuffles them, without a random state: equal inputs give equal keys on every device and
    in every resumed run, the next micro-batch gives others, and neither left padding (log-probs of 0) nor the order
    of rows changes a key.
    """
    bits = log_probs.float().view(torch.int32).bitwise_and(_LOW_31_BITS).long()
    column = _scramble(torch.arange(log_probs.shape[-1], 0, -1, device=bits.device))
    row = _scramble(bits.sum(dim=-1, keepdim=True) & _LOW_31_BITS)
    return _scramble(bits.bitwise_xor_(column).bitwise_xor_(row))


def _scramble(number: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Overwrite 31-bit numbers with others whose order depends on all bits; no product reaches 2^62."""
    number.mul_(0x45D9F3B).bitwise_and_(_LOW_31_BITS)
    number.bitwise_xor_(number >> 15)
    return number.mul_(0x2C1B3C6D).bitwise_and_(_LOW_31_BITS)
