"""Log-probs and entropy over the whole vocabulary, in chunks of tokens; the backward pass recomputes each chunk.

Peak memory beyond inputs and outputs is a few tensors of `chunk x vocabulary`, whatever the batch is. Logits are
computed in the dtype of the weights, the reductions over the vocabulary in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from skyrl.backends.skyrl_train.workers.fsdp.token_scores import (
    DEFAULT_CHUNK_TOKENS,
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


def head_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    bias: Float[Tensor, " vocab"] | None,
    labels: Int[Tensor, " tokens"],
    members: Int[Tensor, "tokens head"] | None = None,
    options: ScoreOptions = DEFAULT_OPTIONS,
) -> TokenScores:
    """Log-probs of labels under softmax((hidden @ weight.T + bias) / temperature), without storing all logits.

    Args:
        hidden: States that predict the labels.
        weight: Output head.
        bias: Its bias.
        labels: Token ids.
        members: Further ids at each position, -1 pads.
        options: See `ScoreOptions`.
    """
    return TokenScores.of(_HeadLogProbs.apply(hidden, weight, bias, *Targets.of(labels, members), options), options)


def logprobs_from_logits(
    logits: Float[Tensor, "*batch vocab"], labels: Int[Tensor, "*batch"], chunk_size: int = DEFAULT_CHUNK_TOKENS
) -> Float[Tensor, "*batch"]:
    """Log-probs of labels in nats, float32, in chunks of tokens."""
    flat = logits.reshape(-1, logits.shape[-1])
    scores = scores_from_logits(flat, labels.reshape(-1), options=ScoreOptions(chunk_tokens=chunk_size))
    return scores.log_probs.view(labels.shape)


def scores_from_logits(
    logits: Float[Tensor, "tokens vocab"],
    labels: Int[Tensor, " tokens"],
    members: Int[Tensor, "tokens head"] | None = None,
    options: ScoreOptions = DEFAULT_OPTIONS,
) -> TokenScores:
    """`head_logprobs` from whole logits, before the temperature."""
    return TokenScores.of(_LogitLogProbs.apply(logits, *Targets.of(labels, members), options), options)


class _HeadLogProbs(torch.autograd.Function):
    """Head, softmax and gather in one; a batch of a single chunk keeps its logits for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        members: Tensor,
        options: ScoreOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        targets, spans = Targets(labels, members), spans_of(len(labels), options.chunk_tokens)
        parts, logits = [], None
        for span in spans:
            logits = torch.nn.functional.linear(hidden[span], weight, bias)
            parts.append(reduce_logits(scaled(logits, options.temperature), targets.part(span), options.with_entropy))
        reduced = Reduced.join(parts, targets)
        kept = logits if len(spans) == 1 else None
        ctx.save_for_backward(hidden, weight, bias, labels, members, reduced.lse, reduced.entropy, kept)
        ctx.options, ctx.spans = options, spans
        ctx.set_materialize_grads(False)
        return reduced.log_probs, reduced.entropy, reduced.members

    @staticmethod
    def backward(ctx: Any, *outer: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, members, lse, entropy, kept = ctx.saved_tensors
        targets, grads = (
            Targets(labels, members),
            Grads(outer[0], outer[1] if ctx.options.with_entropy else None, outer[2]),
        )
        grad_hidden = torch.zeros_like(hidden)
        several = len(ctx.spans) > 1
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if several else torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for span in [] if grads.absent else ctx.spans:
            logits = torch.nn.functional.linear(hidden[span], weight, bias) if kept is None else kept
            logits = scaled(logits, ctx.options.temperature, fresh=True)
            grad = logit_grad(logits, targets.part(span), lse[span], entropy[span], grads.part(span))
            if ctx.options.temperature != 1.0:
                grad.div_(ctx.options.temperature)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)
            grad_hidden[span] = grad @ weight
            if several:
                grad_weight += grad.t() @ hidden[span]
            else:
                grad_weight = grad.t() @ hidden[span]
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None


class _LogitLogProbs(torch.autograd.Function):
    """Softmax and gather from whole logits; the backward pass makes their gradient chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, members: Tensor, options: ScoreOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        targets, spans = Targets(labels, members), spans_of(len(labels), options.chunk_tokens)
        parts = [
            reduce_logits(scaled(logits[span], options.temperature), targets.part(span), options.with_entropy)
            for span in spans
        ]
        reduced = Reduced.join(parts, targets)
        ctx.save_for_backward(logits, labels, members, reduced.lse, reduced.entropy)
        ctx.options, ctx.spans = options, spans
        ctx.set_materialize_grads(False)
        return reduced.log_probs, reduced.entropy, reduced.members

    @staticmethod
    def backward(ctx: Any, *outer: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, labels, members, lse, entropy = ctx.saved_tensors
        targets, options = Targets(labels, members), ctx.options
        grads = Grads(outer[0], outer[1] if options.with_entropy else None, outer[2])
        grad = torch.zeros_like(logits)
        for span in [] if grads.absent else ctx.spans:
            fresh = scaled(logits[span], options.temperature, fresh=True)
            part = logit_grad(fresh, targets.part(span), lse[span], entropy[span], grads.part(span))
            grad[span] = part.div_(options.temperature).to(logits.dtype)
        return grad, None, None, None
