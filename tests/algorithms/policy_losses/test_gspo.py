"""One importance ratio a sequence."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.policy_losses.gspo import gspo_loss
from skyrl.algorithms.policy_losses.reduction_advice import advise_sequence_mean
from skyrl.config.algorithm import AlgorithmConfig
from tests.algorithms.policy_losses.ragged import Batch, make_batch, ragged_batches, run

CONFIG = AlgorithmConfig(eps_clip_low=0.2, eps_clip_high=0.2, loss_reduction="sequence_mean")


def test_every_token_has_the_ratio_of_its_row():
    config = AlgorithmConfig(eps_clip_low=1.0, eps_clip_high=9.0, loss_reduction="sequence_mean")  # no clip
    log_probs, ones = torch.tensor([[0.1, 0.3], [-0.2, -0.2]]), torch.ones(2, 2)
    for token, expected in enumerate([1.221403, 1.221403, 0.818731, 0.818731]):
        only_one = torch.nn.functional.one_hot(torch.tensor(token), 4).view(2, 2)
        loss, _ = gspo_loss(log_probs, torch.zeros(2, 2), ones, config, ones, loss_weights=only_one)
        assert loss.item() == pytest.approx(-expected, rel=1e-6)


@given(ragged_batches(), st.floats(0.02, 0.5), st.floats(0.02, 0.5))
@settings(max_examples=40, deadline=None)
def test_it_agrees_with_a_loop_and_with_the_gradient_of_gspo_token(batch: Batch, low: float, high: float):
    """Equation 14's gradient: at each token -w·s·A, unless the clip binds."""
    config = AlgorithmConfig(eps_clip_low=low, eps_clip_high=high, loss_reduction="sequence_mean")
    loss, metrics, gradient = run(gspo_loss, batch, config)
    total, clipped, expected = 0.0, 0, []
    for row in batch.rows:
        ratio = math.exp(sum(token.logp - token.old for token in row) / max(1, len(row)))
        bounded = min(max(ratio, 1 - low), 1 + high)
        for token in row:
            total += -token.weight * min(ratio * token.advantage, bounded * token.advantage)
            binds = bounded * token.advantage < ratio * token.advantage
            clipped += binds
            expected.append(0.0 if binds else -token.weight * ratio * token.advantage)
    assert loss.item() == pytest.approx(total, rel=1e-9, abs=1e-11)
    assert metrics["clip_ratio"].item() == pytest.approx(clipped / max(1, len(batch.tokens)))
    assert gradient[batch.trained].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert (gradient[~batch.trained] == 0).all()


@given(ragged_batches())
@settings(max_examples=40, deadline=None)
def test_with_one_advantage_a_row_it_is_gspo_of_sequences(batch: Batch):
    """Equation 5 by autograd: one ratio and one minimum a row, mean over rows."""
    mask, num_rows = batch.tensors["loss_mask"], len(batch.rows)
    advantages = torch.linspace(-2.0, 1.7, num_rows, dtype=torch.float64)
    weights = (1 / (num_rows * mask.sum(dim=1, keepdim=True).clamp(min=1))).expand_as(mask)  # sequence_mean
    log_probs = batch.tensors["log_probs"].clone().requires_grad_()
    loss, _ = gspo_loss(
        log_probs, batch.tensors["old_log_probs"], advantages.unsqueeze(1).expand_as(mask), CONFIG, mask,
        loss_weights=weights,
    )  # fmt: skip
    loss.backward()
    plain = [torch.tensor([token.logp for token in row], dtype=torch.float64).requires_grad_() for row in batch.rows]
    objective = torch.zeros((), dtype=torch.float64)
    for row, leaf, advantage in zip(batch.rows, plain, advantages, strict=True):
        if row:
            ratio = (leaf - torch.tensor([token.old for token in row], dtype=torch.float64)).mean().exp()
            objective = objective + torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) / num_rows
    assert loss.item() == pytest.approx(-objective.item(), rel=1e-9, abs=1e-12)
    if batch.tokens:
        (-objective).backward()
        expected = [value for row, leaf in zip(batch.rows, plain, strict=True) if row for value in leaf.grad.tolist()]
        assert log_probs.grad[batch.trained].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_exponent_is_at_most_10():
    log_probs = torch.full((1, 2), 30.0, requires_grad=True)
    loss, _ = gspo_loss(log_probs, torch.zeros(1, 2), torch.tensor([[-1.0, -1.0]]), CONFIG)
    loss.backward()
    assert loss.item() == pytest.approx(2 * math.exp(10))
    assert log_probs.grad.tolist() == [[0.0, 0.0]]


def test_it_warns_once_about_another_reduction(caplog):
    advise_sequence_mean.cache_clear()
    batch = make_batch(0, [2, 3])
    for _ in range(2):
        run(gspo_loss, batch, AlgorithmConfig(loss_reduction="token_mean"))
        run(gspo_loss, batch, CONFIG)
    assert len(caplog.records) == 1
