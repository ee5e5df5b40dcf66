"""PPO's clip, which `regular`, `dual_clip`, `gspo` and `clip_cov` share."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from skyrl.config.algorithm import AlgorithmConfig


def pessimistic_ratio(
    ratio: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    config: AlgorithmConfig,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """Choose between ρ and clip(ρ, 1 - ε_low, 1 + ε_high) the one with the lower product with the advantage.

    So min(ρA, clip(ρ)A) = A times the result (arXiv:1707.06347, eq. 7). No gradient flows where the clip binds.

    Returns:
        The ratio, and 1 where the clip binds, clip(ρ)A < ρA, else 0.
    """
    with torch.no_grad():
        clipped = ratio.clamp(min=1 - config.eps_clip_low, max=1 + config.eps_clip_high)
        binds = (clipped * advantages).lt_(ratio * advantages)  # 1 and 0: in place no flags are made
        free, bound = 1 - binds, clipped.mul_(binds)
    return torch.addcmul(bound, ratio, free), binds
