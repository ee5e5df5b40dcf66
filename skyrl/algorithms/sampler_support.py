"""Log-probs over the candidates that the sampler kept (top-k, top-p, min-p); "keep sampling mask", arXiv:2512.02556.

Truncated sampling draws from a distribution that is renormalised over a set S_t. Training on its log-probs
needs the same set:

    ℓ_t = z_a/τ - log Σ_{v in S_t} exp(z_v/τ),   H_t = -Σ_{v in S_t} p_v·log p_v

Plain torch on logits that exist already; `backends.skyrl_train.workers.fsdp.support_logprobs` is the form that
makes no others. A set holds distinct ids, in any order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

PAD = -1
"""Fills a row of ids up to the width."""
SUPPORT_FLAG = "generator.inference_engine.enable_return_sample_support_set"


class Candidates(NamedTuple):
    """The set that each token is normalised over."""

    ids: Int[Tensor, "*tokens candidates"]
    """The sampled token, then the rest of its set; -1 pads."""
    missed: Bool[Tensor, "*tokens"]
    """The set was there, but without the sampled token."""


def unite(support: Int[Tensor, "*tokens width"], sampled_ids: Int[Tensor, "*tokens"]) -> Candidates:
    """Put the sampled token in front of its set; a token without a set becomes its only candidate."""
    same = support == sampled_ids.unsqueeze(-1)
    rest = support.masked_fill(same, PAD)
    ids = torch.cat([sampled_ids.unsqueeze(-1).to(support.dtype), rest], dim=-1)
    return Candidates(ids, has_ids(support) & ~same.any(dim=-1))


def has_ids(ids: Int[Tensor, "*tokens width"]) -> Bool[Tensor, "*tokens"]:
    """Whether a row holds any id."""
    return (ids > PAD).any(dim=-1)


def candidate_log_probs(
    logits: Float[Tensor, "*tokens candidates"], ids: Int[Tensor, "*tokens candidates"], temperature: float = 1.0
) -> Float[Tensor, "*tokens candidates"]:
    """Return the log-probs of candidates among themselves, in nats and at least float32; -inf where `ids` pads.

    Args:
        logits: Of the candidates, before the temperature; what stands at pads does not matter.
        ids: As `unite` orders them: column 0 of the result is the sampled token's log-prob.
        temperature: Divides the logits.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(torch.where(ids > PAD, logits / temperature, -torch.inf), dim=-1)


def candidate_entropy(log_probs: Float[Tensor, "*tokens candidates"]) -> Float[Tensor, "*tokens"]:
    """Return the entropy in nats of what `candidate_log_probs` returns; -inf counts nothing."""
    shown = torch.where(log_probs > -torch.inf, log_probs, 0.0)
    return -torch.where(log_probs > -torch.inf, shown.exp() * shown, 0.0).sum(dim=-1)


def positions_among(
    members: Int[Tensor, "*tokens head"], ids: Int[Tensor, "*tokens candidates"]
) -> Int[Tensor, "*tokens head"]:
    """Return where each member stands among the candidates; -1 where it does not, or is a pad itself."""
    same = (members.unsqueeze(-1) == ids.unsqueeze(-2)) & (members > PAD).unsqueeze(-1)
    return torch.where(same.any(dim=-1), same.int().argmax(dim=-1), PAD)


def take_positions(
    log_probs: Float[Tensor, "*tokens candidates"], positions: Int[Tensor, "*tokens head"]
) -> Float[Tensor, "*tokens head"]:
    """Return the log-probs at positions; -inf, without gradient, where the position is -1."""
    return torch.where(positions > PAD, log_probs.gather(-1, positions.clamp(min=0)), -torch.inf)


def require_support(support: Int[Tensor, "batch response width"], loss_mask: Float[Tensor, "batch response"]) -> None:
    """Refuse trained tokens that have no set. Waits for the device.

    Raises:
        ValueError: Says how many, and which key makes the engine return sets.
    """
    missing = int(((loss_mask != 0) & ~has_ids(support)).sum())
    if missing:
        raise ValueError(
            f"{missing} trained tokens of a micro-batch have no sample support, which "
            f"trainer.algorithm.enable_sample_support_replay needs; set {SUPPORT_FLAG}=true, and mask tokens that the "
            "engine did not sample"
        )


def require_distinct(ids: Int[Tensor, "*tokens width"], column: str) -> None:
    """Refuse a row that names an id twice, which would count twice. Waits for the device.

    Raises:
        ValueError: Names the column.
    """
    ordered = ids.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] > PAD)
    if bool(twice.any()):
        raise ValueError(f"{column} names an id twice at one token; the engine's side must drop duplicates")
