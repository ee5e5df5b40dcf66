from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from skyrl.backends.skyrl_train.workers.fsdp import support_logprobs as module
from skyrl.backends.skyrl_train.workers.fsdp.logprobs import head_logprobs
from skyrl.backends.skyrl_train.workers.fsdp.support_logprobs import support_logprobs
from skyrl.backends.skyrl_train.workers.fsdp.token_scores import ScoreOptions, TokenScores

HIDDEN, VOCAB, WIDTH, HEAD = 5, 17, 6, 3
ALL = ScoreOptions(temperature=0.7, chunk_tokens=4, with_entropy=True, entropy_grad=True)


class Case:
    """Random states and an output head; sets of every size with pads anywhere, members inside and outside of them."""

    def __init__(self, seed: int, tokens: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(tokens, HIDDEN, generator=draw).to(dtype).requires_grad_()
        self.weight = torch.randn(VOCAB, HIDDEN, generator=draw).to(dtype).requires_grad_()
        self.bias = torch.randn(VOCAB, generator=draw).to(dtype).requires_grad_() if bias else None
        order = torch.rand(tokens, VOCAB, generator=draw).argsort(dim=-1)
        self.labels = order[:, 0]
        keep = torch.rand(tokens, WIDTH, generator=draw) < 0.6
        keep[:, 0] = torch.rand(tokens, generator=draw) < 0.8  # else the sampled token is missing
        shuffle = torch.rand(tokens, WIDTH, generator=draw).argsort(dim=-1)
        self.support = torch.where(keep, order[:, :WIDTH], -1).gather(-1, shuffle).int()
        others = torch.randint(0, VOCAB, (tokens, HEAD), generator=draw)
        others[:, 0] = order[:, 1]
        self.members = torch.where(torch.rand(tokens, HEAD, generator=draw) < 0.8, others, -1).int()

    @property
    def leaves(self) -> list[Tensor]:
        return [tensor for tensor in (self.hidden, self.weight, self.bias) if tensor is not None]

    def score(self, options: ScoreOptions = ALL) -> TokenScores:
        return support_logprobs(self.hidden, self.weight, self.bias, self.labels, self.support, self.members, options)

    def plain(self, temperature: float = 0.7) -> TokenScores:
        """Masked log-softmax over the whole vocabulary, token by token."""
        logits = torch.nn.functional.linear(self.hidden, self.weight, self.bias).double() / temperature
        log_probs, entropies, members = [], [], []
        for row, label, support, ids in zip(logits, self.labels, self.support, self.members, strict=True):
            kept = sorted({int(label), *(int(i) for i in support if i >= 0)})
            log_p = torch.log_softmax(row[kept], dim=-1)
            log_probs.append(log_p[kept.index(int(label))])
            entropies.append(-(log_p.exp() * log_p).sum())
            inside = [log_p[kept.index(int(i))] if int(i) in kept else torch.tensor(-torch.inf).double() for i in ids]
            members.append(torch.stack(inside))
        return TokenScores(torch.stack(log_probs), torch.stack(entropies), torch.stack(members))


def total(scores: TokenScores) -> Tensor:
    """A scalar with different weights for everything that is finite."""
    weights = torch.linspace(-1, 1, scores.members.numel()).reshape(scores.members.shape)
    members = torch.where(scores.members > -torch.inf, scores.members, 0.0)
    by_token = torch.linspace(0.5, -1, len(scores.log_probs))
    return (scores.log_probs * by_token).sum() + 0.3 * (scores.entropy * by_token).sum() + (members * weights).sum()


def assert_equal_to_plain(case: Case, options: ScoreOptions) -> None:
    got, expected = case.score(options), case.plain()
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right.float(), atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad(total(got), case.leaves)
    expected_grads = torch.autograd.grad(total(expected), case.leaves)
    for left, right in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(left, right, atol=2e-5, rtol=1e-5)


@settings(deadline=None, max_examples=40)
@example(seed=5, tokens=5, chunk=1, bias=True)  # one logit far above the others: an entropy of 0.008
@given(
    seed=st.integers(0, 10_000), tokens=st.integers(1, 12), chunk=st.sampled_from([1, 4, 5, 100]), bias=st.booleans()
)
def test_values_and_gradients_are_those_of_a_masked_log_softmax(seed: int, tokens: int, chunk: int, bias: bool) -> None:
    assert_equal_to_plain(Case(seed, tokens, bias), dataclasses.replace(ALL, chunk_tokens=chunk))


def test_wide_sets_over_a_large_vocabulary_take_shorter_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_IDS", 16)  # two tokens of 1 + 6 candidates
    seen: list[int] = []
    plain_unique = torch.unique

    def unique(values: Tensor, **options: bool) -> tuple[Tensor, Tensor]:
        seen.append(len(values))
        return plain_unique(values, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(torch, "unique", unique)
    case = Case(0, 5)
    assert_equal_to_plain(case, ALL)
    assert seen == [2, 2, 1] * 2  # forward and backward


def test_the_whole_vocabulary_is_the_standard_log_prob() -> None:
    case = Case(1, 9)
    every = torch.stack([torch.randperm(VOCAB, generator=torch.Generator().manual_seed(i)) for i in range(9)])
    members = case.members
    got = support_logprobs(case.hidden, case.weight, case.bias, case.labels, every.int(), members, ALL)
    expected = head_logprobs(case.hidden, case.weight, case.bias, case.labels, members, ALL)
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=0)
    grads = [torch.autograd.grad(total(scores), case.leaves) for scores in (got, expected)]
    for left, right in zip(*grads, strict=True):
        torch.testing.assert_close(left, right, atol=2e-5, rtol=0)


def test_only_rows_of_candidates_get_a_gradient() -> None:
    case = Case(2, 3, bias=False)
    case.score().log_probs.sum().backward()
    assert case.weight.grad is not None
    touched = {int(i) for i in torch.cat([case.support.flatten(), case.labels]) if i >= 0}
    outside = [i for i in range(VOCAB) if i not in touched]
    assert outside
    assert not case.weight.grad[outside].any()
    assert case.weight.grad.any()


def test_a_set_of_one_has_log_prob_zero_and_no_gradient() -> None:
    case = Case(3, 4)
    case.support = torch.full((4, 2), -1, dtype=torch.int32)
    case.support[:2, 1] = case.labels[:2].int()
    scores = case.score()
    assert not scores.log_probs.any()
    assert not scores.entropy.any()
    for grad in torch.autograd.grad(scores.log_probs.sum() + scores.entropy.sum(), case.leaves):
        assert not grad.any()


def test_entropy_is_computed_on_request_and_its_gradient_too() -> None:
    case = Case(4, 6)
    off = case.score(ScoreOptions(temperature=0.7))
    assert not off.entropy.any()
    no_grad = case.score(ScoreOptions(temperature=0.7, with_entropy=True))
    assert not no_grad.entropy.requires_grad
    torch.testing.assert_close(no_grad.entropy, case.plain().entropy.float(), atol=1e-5, rtol=1e-5)
    assert torch.equal(off.log_probs, no_grad.log_probs)


def test_no_tokens_give_empty_results_and_zero_gradients() -> None:
    case = Case(5, 3)
    hidden, weight = case.hidden, case.weight
    scores = support_logprobs(hidden[:0], weight, None, case.labels[:0], case.support[:0], case.members[:0])
    assert (scores.log_probs.shape, scores.members.shape) == ((0,), (0, HEAD))
    grads = torch.autograd.grad(scores.log_probs.sum(), [hidden, weight])
    assert not grads[0].any()
    assert not grads[1].any()


def test_bf16_logits_are_reduced_in_float32() -> None:
    case = Case(6, 8, bias=False, dtype=torch.bfloat16)
    got = case.score(ScoreOptions(temperature=0.7))
    assert got.log_probs.dtype == torch.float32
    torch.testing.assert_close(got.log_probs, case.plain().log_probs.float(), atol=1e-5, rtol=1e-5)
    got.log_probs.sum().backward()
    assert case.hidden.grad is not None and case.hidden.grad.dtype == torch.bfloat16
    assert case.weight.grad is not None and case.weight.grad.dtype == torch.bfloat16
