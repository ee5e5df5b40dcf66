"""Log-probs and entropy of labels, in chunks of tokens, with a backward pass that recomputes each chunk.

Peak memory beyond inputs and outputs is a few tensors of `chunk x vocabulary`, whatever the batch is. Logits are
computed in the dtype of the weights, the reductions over the vocabulary in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

DEFAULT_CHUNK_TOKENS = 1024


def head_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    bias: Float[Tensor, " vocab"] | None,
    labels: Int[Tensor, " tokens"],
    *,
    temperature: float = 1.0,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    with_entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-probs of labels under softmax((hidden @ weight.T + bias) / temperature), without storing all logits.

    Args:
        hidden: States that predict the labels.
        weight: Output head.
        bias: Its bias.
        labels: Token ids.
        temperature: Divides the logits.
        chunk_tokens: Tokens whose logits exist at one time.
        with_entropy: Also compute the entropy; otherwise zeros are returned.
        entropy_grad: Whether the entropy carries a gradient.

    Returns:
        Log-probs and entropies in nats, float32.
    """
    logprobs, entropy = _HeadLogProbs.apply(hidden, weight, bias, labels, temperature, chunk_tokens, with_entropy)
    return logprobs, entropy if entropy_grad else entropy.detach()


def logprobs_from_logits(
    logits: Float[Tensor, "*batch vocab"], labels: Int[Tensor, "*batch"], chunk_size: int = DEFAULT_CHUNK_TOKENS
) -> Float[Tensor, "*batch"]:
    """Log-probs of labels in nats, float32, in chunks of tokens."""
    return logprobs_and_entropy_from_logits(logits, labels, chunk_size=chunk_size)[0]


def logprobs_and_entropy_from_logits(
    logits: Float[Tensor, "*batch vocab"],
    labels: Int[Tensor, "*batch"],
    *,
    chunk_size: int = DEFAULT_CHUNK_TOKENS,
    with_entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """Log-probs and entropies (zeros unless asked for) from whole logits, in chunks of tokens."""
    flat = logits.reshape(-1, logits.shape[-1])
    logprobs, entropy = _LogitLogProbs.apply(flat, labels.reshape(-1), chunk_size, with_entropy)
    entropy = entropy if entropy_grad else entropy.detach()
    return logprobs.view(labels.shape), entropy.view(labels.shape)


def _reduce(logits: Tensor, labels: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp, label log-prob and entropy of float32 logits [tokens, vocab]."""
    lse = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - lse
    if not with_entropy:
        return lse, logprobs, torch.zeros_like(lse)
    probabilities = torch.exp(logits - lse.unsqueeze(-1))
    return lse, logprobs, lse - torch.linalg.vecdot(probabilities, logits)


def _logit_grad(
    logits: Tensor, lse: Tensor, labels: Tensor, entropy: Tensor, grads: tuple[Tensor | None, Tensor | None]
) -> Tensor:
    """Gradient by the float32 logits, which are overwritten.

    d logp / d z = onehot - p;  d H / d z = -p (log p + H).
    """
    grad_logprobs, grad_entropy = grads
    log_p = logits.sub_(lse.unsqueeze(-1))
    if grad_entropy is None:
        assert grad_logprobs is not None
        grad = log_p.exp_().mul_(-grad_logprobs.unsqueeze(-1))
        return grad.scatter_add_(-1, labels.unsqueeze(-1), grad_logprobs.unsqueeze(-1))
    p = log_p.exp()
    grad = torch.zeros_like(p) if grad_logprobs is None else p * -grad_logprobs.unsqueeze(-1)
    grad.sub_(log_p.add_(entropy.unsqueeze(-1)).mul_(p).mul_(grad_entropy.unsqueeze(-1)))
    if grad_logprobs is not None:
        grad.scatter_add_(-1, labels.unsqueeze(-1), grad_logprobs.unsqueeze(-1))
    return grad


def _spans(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


class _HeadLogProbs(torch.autograd.Function):
    """Head, softmax and gather in one; a batch of a single chunk keeps its logits for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        spans = _spans(len(labels), chunk)
        parts, logits = [], None
        for span in spans:
            logits = torch.nn.functional.linear(hidden[span], weight, bias)
            parts.append(_reduce(_scaled(logits, temperature), labels[span], with_entropy))
        if parts:
            lse, logprobs, entropy = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        else:
            lse = logprobs = entropy = hidden.new_zeros(0, dtype=torch.float32)
            logprobs, entropy = lse.clone(), lse.clone()
        kept = logits if len(spans) == 1 else None
        ctx.save_for_backward(hidden, weight, bias, labels, lse, entropy, kept)
        ctx.temperature, ctx.spans, ctx.with_entropy = temperature, spans, with_entropy
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, lse, entropy, kept = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads[0], grads[1] if ctx.with_entropy else None
        grad_hidden = torch.zeros_like(hidden)
        several = len(ctx.spans) > 1
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if several else torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        if grad_logprobs is None and grad_entropy is None:
            return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None, None
        for span in ctx.spans:
            logits = torch.nn.functional.linear(hidden[span], weight, bias) if kept is None else kept
            grad = _logit_grad(
                _scaled(logits, ctx.temperature, fresh=True),
                lse[span],
                labels[span],
                entropy[span],
                (_part(grad_logprobs, span), _part(grad_entropy, span)),
            )
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
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
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None, None


class _LogitLogProbs(torch.autograd.Function):
    """Softmax and gather from whole logits; the backward pass makes their gradient chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, chunk: int, with_entropy: bool) -> tuple[Tensor, Tensor]:
        spans = _spans(len(labels), chunk)
        lse, logprobs, entropy = (logits.new_zeros(len(labels), dtype=torch.float32) for _ in range(3))
        for span in spans:
            lse[span], logprobs[span], entropy[span] = _reduce(logits[span].float(), labels[span], with_entropy)
        ctx.save_for_backward(logits, labels, lse, entropy)
        ctx.spans, ctx.with_entropy = spans, with_entropy
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, labels, lse, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads[0], grads[1] if ctx.with_entropy else None
        grad = torch.zeros_like(logits)
        if grad_logprobs is None and grad_entropy is None:
            return grad, None, None, None
        for span in ctx.spans:
            grad[span] = _logit_grad(
                logits[span].to(torch.float32, copy=True),
                lse[span],
                labels[span],
                entropy[span],
                (_part(grad_logprobs, span), _part(grad_entropy, span)),
            ).to(logits.dtype)
        return grad, None, None, None


def _scaled(logits: Tensor, temperature: float, *, fresh: bool = False) -> Tensor:
    """Logits in float32, divided by the temperature; ``fresh`` asks for a tensor that may be overwritten."""
    scaled = logits.to(torch.float32, copy=fresh)
    return scaled if temperature == 1.0 else scaled / temperature


def _part(tensor: Tensor | None, span: slice) -> Tensor | None:
    return None if tensor is None else tensor[span]
