"""From logits of a chunk of tokens to log-probs and entropy, and back: shared by the forms that score tokens.

A token is scored over *columns*: the whole vocabulary, or the candidates of its set. Reductions over columns are in
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

DEFAULT_CHUNK_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """How tokens are scored."""

    temperature: float = 1.0
    """Divides the logits."""
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    """Tokens whose logits exist at one time, at most."""
    with_entropy: bool = False
    """Also compute the entropy; otherwise zeros are returned."""
    entropy_grad: bool = False
    """Whether the entropy carries a gradient."""


DEFAULT_OPTIONS = ScoreOptions()


class TokenScores(NamedTuple):
    """What is known of each scored token, in nats, float32."""

    log_probs: Float[Tensor, "*tokens"]
    entropy: Float[Tensor, "*tokens"]
    """Zeros where nobody asked for it."""
    members: Float[Tensor, "*tokens head"]
    """Log-probs of further tokens at the same position, under the same normaliser; -inf pads."""

    @classmethod
    def of(cls, results: Sequence[Tensor], options: ScoreOptions) -> TokenScores:
        """Name the results of a function, and cut the entropy's gradient unless it is asked for."""
        log_probs, entropy, members = results
        return cls(log_probs, entropy if options.entropy_grad else entropy.detach(), members)


class Targets(NamedTuple):
    """Columns whose log-probs are wanted."""

    labels: Int[Tensor, " tokens"]
    members: Int[Tensor, "tokens head"]
    """-1 pads."""

    @classmethod
    def of(cls, labels: Tensor, members: Tensor | None) -> Targets:
        """Labels and members in int64; no members have width 0."""
        labels = labels.long()
        return cls(labels, labels.new_empty(len(labels), 0) if members is None else members.long())

    def part(self, span: slice) -> Targets:
        """The targets of a chunk."""
        return Targets(self.labels[span], self.members[span])


class Reduced(NamedTuple):
    """What the backward pass needs of the forward pass, and its results."""

    lse: Float[Tensor, " tokens"]
    log_probs: Float[Tensor, " tokens"]
    entropy: Float[Tensor, " tokens"]
    members: Float[Tensor, "tokens head"]

    @classmethod
    def join(cls, parts: Sequence[Reduced], targets: Targets) -> Reduced:
        """Concatenate chunks; no chunk gives tensors without rows."""
        if parts:
            return cls(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
        empty = targets.members.new_empty(0, dtype=torch.float32)
        return cls(empty, empty.clone(), empty.clone(), empty.new_empty(targets.members.shape))


class Grads(NamedTuple):
    """Gradients by the results of a chunk; None stands for zeros."""

    log_probs: Float[Tensor, " tokens"] | None
    entropy: Float[Tensor, " tokens"] | None
    members: Float[Tensor, "tokens head"] | None

    def part(self, span: slice) -> Grads:
        """The gradients of a chunk."""
        return Grads(*(None if grad is None else grad[span] for grad in self))

    @property
    def absent(self) -> bool:
        """Whether nothing has a gradient."""
        return all(grad is None for grad in self)


def spans_of(tokens: int, chunk: int) -> list[slice]:
    """Cut `tokens` into chunks; the last may be shorter."""
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


def scaled(logits: Tensor, temperature: float, *, fresh: bool = False) -> Tensor:
    """Logits in float32, divided by the temperature; ``fresh`` asks for a tensor that may be overwritten."""
    values = logits.to(torch.float32, copy=fresh)
    return values if temperature == 1.0 else values / temperature


def reduce_logits(logits: Float[Tensor, "tokens columns"], targets: Targets, with_entropy: bool) -> Reduced:
    """Log-sum-exp, log-probs of the targets and entropy of float32 logits."""
    lse = torch.logsumexp(logits, dim=-1)
    log_probs = logits.gather(-1, targets.labels.unsqueeze(-1)).squeeze(-1) - lse
    members = logits.gather(-1, targets.members.clamp(min=0)) - lse.unsqueeze(-1)
    members = torch.where(targets.members >= 0, members, -torch.inf)
    if not with_entropy:
        return Reduced(lse, log_probs, torch.zeros_like(lse), members)
    log_p = logits - lse.unsqueeze(-1)  # not lse - Σ p·z, which turns rounding of Σ p into |z| times as much
    return Reduced(lse, log_probs, -torch.linalg.vecdot(log_p.exp(), log_p), members)


def logit_grad(
    logits: Float[Tensor, "tokens columns"], targets: Targets, lse: Tensor, entropy: Tensor, grads: Grads
) -> Float[Tensor, "tokens columns"]:
    """Gradient by the float32 logits, which are overwritten.

    d log p_v / d z = onehot_v - p for the label and each member;  d H / d z = -p·(log p + H).
    """
    by_label = torch.zeros_like(lse) if grads.log_probs is None else grads.log_probs
    by_member = torch.zeros_like(targets.members, dtype=lse.dtype) if grads.members is None else grads.members
    by_target = torch.cat([by_label.unsqueeze(-1), torch.where(targets.members >= 0, by_member, 0.0)], dim=-1)
    columns = torch.cat([targets.labels.unsqueeze(-1), targets.members.clamp(min=0)], dim=-1)
    total = by_target.sum(dim=-1, keepdim=True)
    log_p = logits.sub_(lse.unsqueeze(-1))
    if grads.entropy is None:
        grad = log_p.exp_().mul_(-total)
    else:
        p = log_p.exp()
        grad = p * -total
        grad.sub_(log_p.add_(entropy.unsqueeze(-1)).mul_(p).mul_(grads.entropy.unsqueeze(-1)))
    return grad.scatter_add_(-1, columns, by_target)
