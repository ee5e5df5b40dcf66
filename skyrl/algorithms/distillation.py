"""On-policy distillation: the teacher rewards each token that the student sampled."""

from __future__ import annotations

from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide
from skyrl.algorithms.signatures import require_shape


def distillation_rewards(
    old_log_probs: Float[Tensor, "batch response"],
    teacher_log_probs: Float[Tensor, "batch response"],
    loss_mask: Shaped[Tensor, "batch response"],
) -> Float[Tensor, "batch response"]:
    """Return r_t = -(old - teacher)·mask in nats: minus the k1 estimate of the reverse KL (arXiv:2306.13649).

    With these rewards as advantages of single tokens (estimator `no_op`) and the loss `importance_sampling`, the
    expected gradient is that of the reverse KL of each next-token distribution; later tokens are not credited.

    Args:
        old_log_probs: Of the student before this update.
        teacher_log_probs: Of the same tokens, by the teacher.
        loss_mask: 1 = trains; where it is 0 the reward is exactly 0, whatever stands there.

    Raises:
        ValueError: A tensor has another shape than `old_log_probs`.
    """
    require_shape("teacher_log_probs", teacher_log_probs, "old_log_probs", old_log_probs)
    require_shape("loss_mask", loss_mask, "old_log_probs", old_log_probs)
    return hide(teacher_log_probs - old_log_probs, loss_mask) * loss_mask
