"""Clip-Cov: cut the gradient of a few tokens whose covariance is high."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide, weighted_sum
from skyrl.algorithms.policy_losses.clipped_ratio import pessimistic_ratio
from skyrl.algorithms.policy_losses.covariance import token_covariance
from skyrl.algorithms.policy_losses.ratio import at_least_float32, importance_ratio
from skyrl.algorithms.policy_losses.registry import register_policy_loss
from skyrl.config.algorithm import AlgorithmConfig, ClipCovConfig

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
    the values alone (see `shuffle_keys`). Log-probs are in nats; for `loss_weights` see `regular`. Waits for the
    device twice.

    Returns:
        The scalar loss, and `clip_ratio`: share of trained tokens that were drawn.
    """
    trained = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask.bool()
    advantages = at_least_float32(hide(advantages, trained))
    ratio, clipped = pessimistic_ratio(importance_ratio(log_probs, old_log_probs, trained), advantages, config)
    drawn = _drawn(log_probs, advantages, trained, clipped, config.clip_cov)
    pull = advantages.neg().flatten().index_fill_(0, drawn, 0.0).view_as(advantages)
    mask = trained if loss_mask is None else loss_mask
    share = mask.flatten()[drawn].sum(dtype=ratio.dtype) / mask.sum(dtype=ratio.dtype).clamp(min=1)
    loss = weighted_sum(ratio * pull, loss_mask, loss_weights)
    return loss, {"clip_ratio": share}


@torch.no_grad()
def _drawn(
    log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    trained: Bool[Tensor, "batch response"],
    clipped: Float[Tensor, "batch response"],
    config: ClipCovConfig,
) -> Int[Tensor, " drawn"]:
    """Draw max(1, floor(share · trained tokens)) candidates, or all where they are fewer; cells of the flat tensors."""
    shown = at_least_float32(hide(log_probs, trained))
    covariance = token_covariance(shown, advantages, trained).flatten()
    cells = (covariance > config.clip_cov_lb).nonzero().squeeze(-1)  # few
    free = (clipped.flatten()[cells] == 0) & trained.flatten()[cells]
    cells = cells[free & (covariance[cells] < config.clip_cov_ub)]
    count = min(max(1, int(config.clip_ratio * int(torch.count_nonzero(trained)))), len(cells))
    return cells[shuffle_keys(shown, cells).topk(count, largest=False, sorted=False).indices]


def shuffle_keys(
    log_probs: Float[Tensor, "batch response"], cells: Int[Tensor, " cells"] | None = None
) -> Int[Tensor, "batch response"] | Int[Tensor, " cells"]:
    """Hash tokens to 31 bits by their own log-prob, all log-probs of their row, and their distance from the right.

    Ordering tokens by it shuffles them, without a random state: equal inputs give equal keys on every device and
    in every resumed run, the next micro-batch gives others, and neither left padding (log-probs of 0) nor the order
    of rows changes a key.

    Args:
        log_probs: Of all tokens.
        cells: Which tokens of the flattened tensor to hash; None takes all.
    """
    width = log_probs.shape[-1]
    bits = log_probs.float().contiguous().view(torch.int32)
    if cells is None:
        return shuffle_keys(log_probs, torch.arange(bits.numel(), device=bits.device)).view_as(log_probs)
    row = _scramble(bits.sum(dim=-1, dtype=torch.int64).bitwise_and_(_LOW_31_BITS))
    column = _scramble(width - cells % width)
    token = bits.flatten()[cells].long().bitwise_and_(_LOW_31_BITS)
    return _scramble(token.bitwise_xor_(column).bitwise_xor_(row[cells // width]))


def _scramble(number: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Overwrite 31-bit numbers with others whose order depends on all bits; no product reaches 2^62."""
    number.mul_(0x45D9F3B).bitwise_and_(_LOW_31_BITS)
    number.bitwise_xor_(number >> 15)
    return number.mul_(0x2C1B3C6D).bitwise_and_(_LOW_31_BITS)
