"""How far the log-probs of the trainer's policy lie from those of the engine that sampled, over a whole batch."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.kl import compute_approx_kl

GAP = "policy/rollout_train_logprobs_abs_diff"
KL = "policy/rollout_train_kl"
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def logprob_gap(
    old_log_probs: Float[Tensor, "batch response"],
    rollout_logprobs: Float[Tensor, "batch response"],
    loss_mask: Shaped[Tensor, "batch response"],
) -> dict[str, float]:
    """Measure |old - sampler| in nats, and estimate KL(sampler ‖ old) by k1 and k3, over the trained tokens.

    Returns:
        `GAP` with `_max`, `_min`, `_mean`, `_std` and the quantiles, `KL` with `_k1` and `_k3`; empty without a
        trained token.
    """
    trained = loss_mask != 0
    old, sampled = old_log_probs[trained].float(), rollout_logprobs[trained].float()
    if not old.numel():
        return {}
    gap = (old - sampled).abs()
    quantiles = np.quantile(gap.cpu().numpy(), list(QUANTILES.values()))  # torch's takes 2^24 values at most
    return {
        f"{GAP}_max": gap.max().item(),
        f"{GAP}_min": gap.min().item(),
        f"{GAP}_mean": gap.mean().item(),
        f"{GAP}_std": gap.std(unbiased=False).item(),
        **{f"{GAP}_{name}": float(value) for name, value in zip(QUANTILES, quantiles, strict=True)},
        **{f"{KL}_{name}": compute_approx_kl(sampled, old, None, name).mean().item() for name in ("k1", "k3")},
    }
