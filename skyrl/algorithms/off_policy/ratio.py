"""The ratio ρ = π_old / π_sampler of a sampled token, on which every correction rests, and its diagnostics."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide, masked_max, masked_min
from skyrl.algorithms.mean import Mean, MetricValue
from skyrl.algorithms.safe_exp import safe_exp
from skyrl.algorithms.signatures import require_shape

KEY = "trainer.algorithm.off_policy_correction"


def trained_tokens(
    old_log_probs: Float[Tensor, "batch response"], loss_mask: Shaped[Tensor, "batch response"] | None
) -> Bool[Tensor, "batch response"]:
    """Return where the mask is not zero; everywhere without a mask.

    Raises:
        ValueError: The mask has another shape.
    """
    if loss_mask is None:
        return torch.ones_like(old_log_probs, dtype=torch.bool)
    require_shape("loss_mask", loss_mask, "old_log_probs", old_log_probs)
    return loss_mask != 0


def log_ratio(
    old_log_probs: Float[Tensor, "batch response"],
    rollout_logprobs: Float[Tensor, "batch response"],
    trained: Bool[Tensor, "batch response"],
) -> Float[Tensor, "batch response"]:
    """Return d = old_log_probs - rollout_logprobs in nats, without gradient, in at least float32; 0 where masked.

    Raises:
        ValueError: The tensors differ in shape.
    """
    require_shape("rollout_logprobs", rollout_logprobs, "old_log_probs", old_log_probs)
    dtype = torch.promote_types(old_log_probs.dtype, torch.float32)
    return hide(old_log_probs.detach().to(dtype) - rollout_logprobs.detach().to(dtype), trained)


def ratio_metrics(
    diff: Float[Tensor, "batch response"], trained: Bool[Tensor, "batch response"]
) -> dict[str, MetricValue]:
    """Mean, mean square, maximum and minimum of ρ over the trained tokens, as `is_ratio_*`.

    Without a trained token the last two are -inf and inf, which the workers' `MetricBuffer` takes for no value.
    """
    ratio = safe_exp(diff)
    return {
        "is_ratio_mean": Mean.over(ratio, trained),
        "is_ratio_sq_mean": Mean.over(ratio.square(), trained),
        "is_ratio_max": masked_max(ratio, trained),
        "is_ratio_min": masked_min(ratio, trained),
    }


def interval_metrics(
    prefix: str, over: Bool[Tensor, " batch"], under: Bool[Tensor, " batch"], rows: Bool[Tensor, " batch"]
) -> dict[str, MetricValue]:
    """Shares of the rows that an interval drops: in all, for exceeding it, and for falling short of it."""
    return {
        f"{prefix}_masked_ratio": Mean.over(over | under, rows),
        f"{prefix}_over_high_ratio": Mean.over(over, rows),
        f"{prefix}_under_low_ratio": Mean.over(under, rows),
    }
