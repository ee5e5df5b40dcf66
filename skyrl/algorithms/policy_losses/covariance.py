"""How a token's advantage and log-prob vary together, which `clip_cov` and `kl_cov` rank tokens by."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@torch.no_grad()
def token_covariance(
    log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    trained: Bool[Tensor, "batch response"],
) -> Float[Tensor, "batch response"]:
    """Return (A - mean A)(log_probs - mean log_probs), in nats, with means over trained tokens (arXiv:2505.22617).

    Both inputs must be hidden, that is 0 at tokens that do not train; the result there means nothing.
    """
    count = trained.sum().clamp(min=1)
    return (advantages - advantages.sum() / count).mul_(log_probs - log_probs.sum() / count)
