"""Score centering: subtract the score that the sampler expects at each prefix."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerHead:
    """The likeliest tokens of the sampler at each position of a micro-batch, and what the trainer says of them."""

    ids: Int[Tensor, "batch response head"]
    """Token ids, -1 pads; a position without a head is all -1."""
    sampler_log_probs: Float[Tensor, "batch response head"]
    """Of the sampler, in nats; -inf pads."""
    log_probs: Float[Tensor, "batch response head"]
    """Of the model now, with the normaliser of the sampled token's log-prob (has grad); -inf pads."""
    sampled_ids: Int[Tensor, "batch response"]
    """The sampled tokens."""
