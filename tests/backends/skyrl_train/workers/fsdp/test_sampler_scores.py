"""A model scores sets and further ids like transformers' own logits, whatever its head does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.workers.fsdp.model import HFModelWrapper, score_response
from skyrl.backends.skyrl_train.workers.fsdp.token_scores import TokenScores
from skyrl.backends.skyrl_train.workers.micro_batches import get_microbatch_iterator, trim_left_padding
from skyrl.backends.skyrl_train.workers.sampler_columns import SamplerColumns
from tests.backends.skyrl_train.workers.batches import RESPONSE
from tests.backends.skyrl_train.workers.sampler_batches import HEAD, make_sampler_batch, plain_scores

T = 0.8


def build(path: Path, *, plain_head: bool = True) -> HFModelWrapper:
    model = HFModelWrapper(str(path), bf16=False, temperature=T, logprobs_chunk_size=7)
    model._plain_head = plain_head
    return model


def score(model: HFModelWrapper, batch: TrainingInputBatch, *, replay: bool = True) -> TokenScores:
    columns = SamplerColumns.of(batch, replay=replay, centering=True)
    return score_response(model, batch, columns, T, entropy=True, entropy_grad=True)


def as_tensors(model: HFModelWrapper, batch: TrainingInputBatch, *, replay: bool) -> TokenScores:
    """The plain loop's scores in the shape of `TokenScores`."""
    shape = batch["loss_mask"].shape
    offset = batch["sequences"].shape[1] - shape[1]
    scores = plain_scores(model.model, batch, T, replay=replay)
    log_probs, entropy = torch.zeros(shape), torch.zeros(shape)
    members = torch.full((*shape, HEAD), -torch.inf)
    for (row, column), token in scores.items():
        log_probs[row, column] = token.log_p[int(batch["sequences"][row, offset + column])]
        entropy[row, column] = token.entropy
        for place, member in enumerate(batch["sampler_topk_ids"][row, column].tolist()):
            if member >= 0:
                members[row, column, place] = token.log_p[member]
    return TokenScores(log_probs, entropy, members)


def total(scores: TokenScores, mask: Tensor) -> Tensor:
    members = torch.where((scores.members > -torch.inf) & (mask != 0).unsqueeze(-1), scores.members, 0.0)
    slope = torch.linspace(-1, 1, members.numel()).reshape(members.shape)
    return ((scores.log_probs - 0.3 * scores.entropy) * mask).sum() + (members * slope).sum()


@pytest.mark.parametrize("plain_head", [True, False])
@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("tie", [True, False])
def test_values_and_gradients_equal_a_plain_loop(make_model: object, plain_head: bool, replay: bool, tie: bool) -> None:
    """All parameters, the embedding that is also the head included."""
    path = make_model("qwen3", layers=2, tie=tie)  # type: ignore[operator]
    model, batch = build(path, plain_head=plain_head), make_sampler_batch(rows=4)
    mask = batch["loss_mask"]
    got, expected = score(model, batch, replay=replay), as_tensors(model, batch, replay=replay)
    shown = mask != 0
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left[shown], right[shown], atol=2e-5, rtol=0)
    total(got, mask).backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.model.named_parameters()}
    model.zero_grad()
    total(expected, mask).backward()
    assert ("lm_head.weight" in grads) == (not tie)
    for name, parameter in model.model.named_parameters():
        torch.testing.assert_close(
            grads[name], parameter.grad, atol=5e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_tokens_without_a_set_score_zero(tiny_model: Path) -> None:
    model, batch = build(tiny_model), make_sampler_batch()
    with torch.no_grad():
        scores = score(model, batch)
    hidden = batch["loss_mask"] == 0
    assert not scores.log_probs[hidden].any()
    assert not scores.entropy[hidden].any()
    assert (scores.members[hidden] == -torch.inf).all()
    assert (scores.log_probs[~hidden] < 0).all()


def test_without_columns_the_log_probs_are_the_usual_ones(tiny_model: Path) -> None:
    model, batch = build(tiny_model), make_sampler_batch()
    with torch.no_grad():
        plain = score_response(model, batch, SamplerColumns(), T)
        with_head = score(model, batch, replay=False)
    assert torch.equal(plain.log_probs, with_head.log_probs)
    assert plain.members.shape == (len(batch), RESPONSE, 0)


def test_the_whole_vocabulary_as_set_changes_nothing(tiny_model: Path) -> None:
    model, batch = build(tiny_model), make_sampler_batch()
    every = torch.arange(128, dtype=torch.int32).flip(0).expand(len(batch), RESPONSE, 128)
    with torch.no_grad():
        plain = score_response(model, batch, SamplerColumns(), T, entropy=True)
        replayed = score_response(model, batch, SamplerColumns(support=every), T, entropy=True)
    torch.testing.assert_close(replayed.log_probs, plain.log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(replayed.entropy, plain.entropy, atol=1e-5, rtol=0)


def test_micro_batches_and_dropped_padding_keep_the_columns_in_place(tiny_model: Path) -> None:
    """Trimmed sequences are shorter than the response is wide: response columns stay right-aligned."""
    model, batch = build(tiny_model), make_sampler_batch()
    wide = batch[0 : len(batch)]
    wide.metadata["response_length"] = RESPONSE + 16
    for key in ("response_mask", "loss_mask", "sample_support", "sampler_topk_ids", "sampler_topk_logprobs"):
        pad = -1 if key in {"sample_support", "sampler_topk_ids"} else 0
        wide[key] = torch.cat([torch.full_like(batch[key], pad)] * 2 + [batch[key]], dim=1)[:, -(RESPONSE + 16) :]
    with torch.no_grad():
        whole = score(model, batch)
        parts = [score(model, micro) for micro in get_microbatch_iterator(wide, 3)]
    assert trim_left_padding(wide[0:2])["sequences"].shape[1] < RESPONSE + 16
    for name in TokenScores._fields:
        joined = torch.cat([getattr(part, name) for part in parts])[:, 16:]
        torch.testing.assert_close(joined, getattr(whole, name), atol=2e-5, rtol=0)
