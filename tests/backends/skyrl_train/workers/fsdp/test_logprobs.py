from __future__ import annotations

import pytest
import torch
from torch import Tensor

from skyrl.backends.skyrl_train.workers.fsdp.logprobs import head_logprobs, logprobs_from_logits, scores_from_logits
from skyrl.backends.skyrl_train.workers.fsdp.token_scores import ScoreOptions

TOKENS, HIDDEN, VOCAB = 11, 5, 17


def tensors(dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    offset = torch.randn(VOCAB, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    return hidden, weight, offset, torch.randint(0, VOCAB, (TOKENS,), generator=draw)


def whole(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, t: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias) / t, dim=-1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def same_gradients(grads: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 4, TOKENS, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias", [True, False])
def test_chunks_change_neither_values_nor_gradients(chunk: int, temperature: float, bias: bool) -> None:
    hidden, weight, offset, labels = tensors(torch.float32, bias)
    inputs = [tensor for tensor in (hidden, weight, offset) if tensor is not None]
    expected = whole(hidden, weight, offset, labels, temperature)
    scale = torch.linspace(-1, 1, TOKENS)
    expected_grads = torch.autograd.grad((expected[0] * scale + 0.3 * expected[1] * scale.flip(0)).sum(), inputs)
    options = ScoreOptions(temperature=temperature, chunk_tokens=chunk, with_entropy=True, entropy_grad=True)
    got = head_logprobs(hidden, weight, offset, labels, options=options)
    torch.testing.assert_close(got[0], expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[1], expected[1], atol=1e-5, rtol=1e-5)
    same_gradients(torch.autograd.grad((got[0] * scale + 0.3 * got[1] * scale.flip(0)).sum(), inputs), expected_grads)


def test_log_probs_alone_have_the_same_gradient() -> None:
    hidden, weight, offset, labels = tensors(torch.float32)
    expected = torch.autograd.grad(whole(hidden, weight, offset, labels, 1.0)[0].sum(), [hidden, weight])
    got, entropy, _ = head_logprobs(hidden, weight, offset, labels, options=ScoreOptions(chunk_tokens=3))
    assert not entropy.any()
    same_gradients(torch.autograd.grad(got.sum(), [hidden, weight]), expected)


def test_entropy_without_gradient_has_none() -> None:
    hidden, weight, offset, labels = tensors(torch.float32)
    logprobs, entropy, _ = head_logprobs(hidden, weight, offset, labels, options=ScoreOptions(with_entropy=True))
    assert logprobs.requires_grad
    assert not entropy.requires_grad


def test_no_tokens_give_empty_results_and_zero_gradients() -> None:
    hidden, weight, offset, labels = tensors(torch.float32)
    logprobs, _, _ = head_logprobs(hidden[:0], weight, offset, labels[:0])
    assert logprobs.shape == (0,)
    assert not torch.autograd.grad(logprobs.sum(), weight)[0].any()


def test_bf16_logits_are_reduced_in_float32() -> None:
    hidden, weight, _, labels = tensors(torch.bfloat16, bias=False)
    logits = hidden @ weight.t()  # rounded to bf16, as the engine's
    expected = torch.log_softmax(logits.float(), -1).gather(-1, labels[:, None])[:, 0]
    got, _, _ = head_logprobs(hidden, weight, None, labels, options=ScoreOptions(chunk_tokens=4))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
    got.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


def test_logits_of_any_shape() -> None:
    logits = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([[0, 1, 2], [3, 4, 5]])
    expected = torch.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(logprobs_from_logits(logits, labels, chunk_size=2), expected)


def members_of(labels: Tensor) -> Tensor:
    """Three further ids at each token: the label itself, a neighbour, and a pad at every other token."""
    third = torch.where(torch.arange(TOKENS) % 2 == 0, (labels + 5) % VOCAB, -1)
    return torch.stack([labels, (labels + 1) % VOCAB, third], dim=-1).int()


@pytest.mark.parametrize("chunk", [1, 4, TOKENS, 100])
@pytest.mark.parametrize("whole_logits", [True, False])
def test_further_ids_have_the_same_normaliser_and_their_own_gradient(chunk: int, whole_logits: bool) -> None:
    hidden, weight, _, labels = tensors(torch.float32, bias=False)
    members = members_of(labels)
    options = ScoreOptions(temperature=0.7, chunk_tokens=chunk, with_entropy=True, entropy_grad=True)
    log_p = torch.log_softmax(hidden @ weight.t() / 0.7, dim=-1)
    shown = members >= 0
    expected = torch.where(shown, log_p.gather(-1, members.clamp(min=0).long()), -torch.inf)
    entropy = -(log_p.exp() * log_p).sum(-1)
    factors = torch.linspace(-1, 1, TOKENS * 3).reshape(TOKENS, 3)
    label_log_p = log_p.gather(-1, labels[:, None])[:, 0]

    def total(label: Tensor, others: Tensor, spread: Tensor) -> Tensor:
        return label.sum() + (torch.where(shown, others, 0.0) * factors).sum() + 0.3 * spread.sum()

    grads = torch.autograd.grad(total(label_log_p, expected, entropy), [hidden, weight])
    if whole_logits:
        got = scores_from_logits(hidden @ weight.t(), labels, members, options)
    else:
        got = head_logprobs(hidden, weight, None, labels, members, options)
    torch.testing.assert_close(got.log_probs, label_log_p, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.members, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.entropy, entropy, atol=1e-5, rtol=1e-5)
    same_gradients(torch.autograd.grad(total(*[got.log_probs, got.members, got.entropy]), [hidden, weight]), grads)


def test_further_ids_alone_may_carry_the_gradient() -> None:
    hidden, weight, _, labels = tensors(torch.float32, bias=False)
    members = members_of(labels)[:, :2]
    log_p = torch.log_softmax(hidden @ weight.t(), dim=-1).gather(-1, members.long())
    expected = torch.autograd.grad(log_p.sum(), [hidden, weight])
    got = head_logprobs(hidden, weight, None, labels, members, ScoreOptions(chunk_tokens=3))
    same_gradients(torch.autograd.grad(got.members.sum(), [hidden, weight]), expected)


def test_an_impossible_token_is_minus_infinity_and_spares_its_neighbours() -> None:
    logits = torch.zeros(2, 4)
    logits[0, 1] = -torch.inf
    got = logprobs_from_logits(logits, torch.tensor([1, 1]))
    assert got[0] == -torch.inf
    assert got[1] == pytest.approx(-(torch.tensor(4.0).log().item()))
