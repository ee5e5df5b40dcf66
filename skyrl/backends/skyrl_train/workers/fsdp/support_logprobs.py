"""Log-probs and entropy over the candidates that the sampler kept, without logits over the vocabulary.

Each chunk of tokens takes the *distinct* ids of all its candidates, U rows of the output head, and one product
`hidden x rows`. That needs a copy of U rows, where gathering each token's own rows would need tokens x width of them
(neighbouring tokens share most candidates), its gradient to the head is one product too, and since the ids are
distinct the rows are added to the head's gradient in a fixed order. U is at most the vocabulary, and at most
`MOST_IDS` where the vocabulary is larger: wide sets get shorter chunks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from skyrl.algorithms.sampler_support import positions_among, unite
from skyrl.backends.skyrl_train.workers.fsdp.token_scores import (
    DEFAULT_OPTIONS,
    Grads,
    Reduced,
    ScoreOptions,
    Targets,
    TokenScores,
    logit_grad,
    reduce_logits,
    scaled,
    spans_of,
)

MOST_IDS = 32768
"""Candidates of a chunk, counted with repetitions: bounds the rows that are copied at one time."""
_NOTHING = -1e30
"""Logit of a pad: its probability is exactly 0, and so is its product with this, which -inf would make NaN."""


def support_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    bias: Float[Tensor, " vocab"] | None,
    labels: Int[Tensor, " tokens"],
    support: Int[Tensor, "tokens width"],
    members: Int[Tensor, "tokens head"] | None = None,
    options: ScoreOptions = DEFAULT_OPTIONS,
) -> TokenScores:
    """Log-probs of labels under a softmax over each token's set (`algorithms.sampler_support`).

    Args:
        hidden: States that predict the labels.
        weight: Output head; its gradient is zero but for the rows of candidates.
        bias: Its bias.
        labels: Token ids; one that its set lacks joins the set.
        support: The sets, distinct ids, -1 pads; an empty one holds the label alone.
        members: Further ids at each position, -1 pads; one outside the set has log-prob -inf.
        options: See `ScoreOptions`; the entropy is that over the set.
    """
    candidates = unite(support, labels).ids
    others = Targets.of(labels, members).members
    if weight.shape[0] > MOST_IDS:
        most_tokens = max(1, MOST_IDS // candidates.shape[1])
        options = replace(options, chunk_tokens=min(options.chunk_tokens, most_tokens))
    return TokenScores.of(_SupportLogProbs.apply(hidden, weight, bias, candidates, others, options), options)


class _Columns(NamedTuple):
    """The candidates of a chunk of tokens."""

    ids: Int[Tensor, " distinct"]
    where: Int[Tensor, "tokens candidates"]
    """Place of each candidate among the distinct ids; a pad has that of column 0."""
    shown: Bool[Tensor, "tokens candidates"]
    """False = a pad."""
    targets: Targets
    """The label (column 0) and the members, as columns of the candidates."""

    @classmethod
    def of(cls, candidates: Tensor, members: Tensor) -> _Columns:
        shown = candidates >= 0
        ids, where = torch.unique(torch.where(shown, candidates, candidates[:, :1]), return_inverse=True)
        labels = torch.zeros(len(candidates), dtype=torch.int64, device=candidates.device)
        return cls(ids.long(), where, shown, Targets(labels, positions_among(members, candidates)))

    def logits(self, hidden: Tensor, rows: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
        """Logits of each token's candidates in float32, in a tensor that may be overwritten."""
        every = torch.nn.functional.linear(hidden, rows, None if bias is None else bias[self.ids])
        return scaled(every.gather(1, self.where), temperature).masked_fill(~self.shown, _NOTHING)

    def spread(self, grad: Tensor) -> Tensor:
        """Move a gradient by the candidates' logits to the distinct ids."""
        return grad.new_zeros(len(grad), len(self.ids)).scatter_add_(1, self.where, grad)


class _SupportLogProbs(torch.autograd.Function):
    """Rows of the head, softmax over each set and gather in one; the backward pass recomputes each chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        candidates: Tensor,
        members: Tensor,
        options: ScoreOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        spans, parts = spans_of(len(candidates), options.chunk_tokens), []
        for span in spans:
            columns = _Columns.of(candidates[span], members[span])
            logits = columns.logits(hidden[span], weight.index_select(0, columns.ids), bias, options.temperature)
            parts.append(reduce_logits(logits, columns.targets, options.with_entropy))
        reduced = Reduced.join(parts, Targets(candidates[:, 0], members))
        ctx.save_for_backward(hidden, weight, bias, candidates, members, reduced.lse, reduced.entropy)
        ctx.options, ctx.spans = options, spans
        ctx.set_materialize_grads(False)
        return reduced.log_probs, reduced.entropy, reduced.members

    @staticmethod
    def backward(ctx: Any, *outer: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, candidates, members, lse, entropy = ctx.saved_tensors
        grads = Grads(outer[0], outer[1] if ctx.options.with_entropy else None, outer[2])
        several = len(ctx.spans) > 1
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32 if several else weight.dtype)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for span in [] if grads.absent else ctx.spans:
            columns = _Columns.of(candidates[span], members[span])
            rows = weight.index_select(0, columns.ids)
            logits = columns.logits(hidden[span], rows, bias, ctx.options.temperature)
            grad = logit_grad(logits, columns.targets, lse[span], entropy[span], grads.part(span))
            grad = columns.spread(grad).div_(ctx.options.temperature)
            if grad_bias is not None:
                grad_bias.index_add_(0, columns.ids, grad.sum(0))
            grad = grad.to(weight.dtype)
            grad_hidden[span] = grad @ rows
            grad_weight.index_add_(0, columns.ids, (grad.t() @ hidden[span]).to(grad_weight.dtype))
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None
