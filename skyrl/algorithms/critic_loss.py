"""The value function's loss."""

from __future__ import annotations

from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide, masked_mean, weighted_sum
from skyrl.algorithms.signatures import require_shape


def critic_loss(
    values: Float[Tensor, "batch response"],
    old_values: Float[Tensor, "batch response"],
    returns: Float[Tensor, "batch response"],
    *,
    loss_mask: Shaped[Tensor, "batch response"] | None = None,
    loss_weights: Float[Tensor, "batch response"] | None = None,
    value_clip: float | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Clipped squared error of the values (PPO2's value clipping; arXiv:2005.12729, section 3).

    L = ½·Σ w·m·max((V_c - R)², (V - R)²), where V_c is V kept within `value_clip` of the old value.

    Args:
        values: The critic's output now (has grad).
        old_values: The critic's output before this update.
        returns: What the values should be.
        loss_mask: 1 = trains.
        loss_weights: The loss reduction (`loss_reduction.py`); None sums plainly.
        value_clip: None or 0 turns clipping off.

    Returns:
        The scalar loss, and the means over trained tokens `values_mean` and `values_clipfrac`, the share whose
        clipped error is the larger.

    Raises:
        ValueError: A tensor has another shape than `values`.
    """
    others = {"old_values": old_values, "returns": returns, "loss_mask": loss_mask, "loss_weights": loss_weights}
    for name, tensor in others.items():
        if tensor is not None:
            require_shape(name, tensor, "values", values)
    values = hide(values, loss_mask)
    free = (values - returns).square()
    if value_clip:
        clipped = (values.clamp(old_values - value_clip, old_values + value_clip) - returns).square()
        error, is_clipped = free.maximum(clipped), clipped > free
    else:
        error, is_clipped = free, free < 0
    loss = 0.5 * weighted_sum(error, loss_mask, loss_weights)
    return loss, {
        "values_mean": masked_mean(values.detach(), loss_mask),
        "values_clipfrac": masked_mean(is_clipped.to(values.dtype), loss_mask),
    }
