"""KL-Cov: a KL penalty on the tokens whose covariance is highest."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide, weighted_sum
from skyrl.algorithms.policy_losses.covariance import token_covariance
from skyrl.algorithms.policy_losses.ratio import at_least_float32, log_ratio
from skyrl.algorithms.policy_losses.registry import register_policy_loss
from skyrl.algorithms.safe_exp import safe_exp
from skyrl.config.algorithm import AlgorithmConfig, KLCovConfig

_SAMPLE_STRIDE = 61
"""One token in so many tells how large the highest values are; a prime, so that it meets all columns."""


@register_policy_loss("kl_cov", correctable=False)
def kl_cov_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    config: AlgorithmConfig,
    loss_mask: Shaped[Tensor, "batch response"] | None = None,
    rollout_logprobs: Float[Tensor, "batch response"] | None = None,
    *,
    loss_weights: Float[Tensor, "batch response"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """KL-Cov: L = -ρA, plus c·|log_probs - old_log_probs| at the tokens of highest covariance (arXiv:2505.22617).

    Those are max(1, floor(`kl_cov.kl_cov_frac` times the trained tokens)); c is `kl_cov.ppo_kl_coef`. Nothing is
    clipped. Log-probs are in nats; for `loss_weights` see `regular`. Waits for the device twice or three times.

    Returns:
        The scalar loss, and `clip_ratio`, which is 0.
    """
    trained = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask.bool()
    advantages = at_least_float32(hide(advantages, trained))
    difference = log_ratio(log_probs, old_log_probs, trained)
    slopes = _penalty_slopes(log_probs, difference, advantages, trained, config.kl_cov)
    # The penalty c·|difference| is difference times its own slope.
    token_loss = torch.addcmul(difference * slopes, safe_exp(difference), advantages, value=-1)
    loss = weighted_sum(token_loss, loss_mask, loss_weights)
    return loss, {"clip_ratio": loss.new_zeros(())}


@torch.no_grad()
def _penalty_slopes(
    log_probs: Float[Tensor, "batch response"],
    difference: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    trained: Bool[Tensor, "batch response"],
    config: KLCovConfig,
) -> Float[Tensor, "batch response"]:
    """Return c·sign(difference) at the tokens of highest covariance, zeros elsewhere."""
    covariance = token_covariance(at_least_float32(hide(log_probs, trained)), advantages, trained)
    cells = _highest(covariance, trained, config.kl_cov_frac)
    signs = difference.flatten()[cells].sign()
    slopes = torch.zeros_like(difference)
    slopes.view(-1).index_copy_(0, cells, signs * config.ppo_kl_coef)
    return slopes


def _highest(
    values: Float[Tensor, "batch response"], trained: Bool[Tensor, "batch response"], share: float
) -> Int[Tensor, " cells"]:
    """Return the cells of the max(1, floor(share · trained tokens)) largest values among trained tokens."""
    flat, shown = values.flatten(), trained.flatten()
    num_trained = int(torch.count_nonzero(shown))
    count = min(max(1, int(share * num_trained)), num_trained)
    cells = ((flat >= _least(flat, shown, count)) & shown).nonzero().squeeze(-1)
    if len(cells) < count:  # the sample was misleading
        cells = shown.nonzero().squeeze(-1)
    return cells[flat[cells].topk(count, sorted=False).indices]


def _least(flat: Float[Tensor, " tokens"], shown: Bool[Tensor, " tokens"], count: int) -> Float[Tensor, ""]:
    """Guess from a sample a value which a few more than the `count` largest reach."""
    sample = torch.where(shown[::_SAMPLE_STRIDE], flat[::_SAMPLE_STRIDE], -torch.inf)
    wanted = min(len(sample), int(1.25 * count / _SAMPLE_STRIDE) + 16)
    return sample.topk(wanted, sorted=False).values.amin() if wanted else flat.new_zeros(())
