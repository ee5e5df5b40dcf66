"""PPO's clipped surrogate."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.policy_losses.regular import regular_loss
from skyrl.config.algorithm import AlgorithmConfig

CONFIG = AlgorithmConfig(eps_clip_low=0.2, eps_clip_high=0.2)


def test_the_loss_has_the_spec_values():
    log_probs = torch.tensor([[1.5, 0.5, 4.0]]).log()
    advantages = torch.tensor([[1.0, -1.0, -2.0]])
    for token, expected in enumerate([-1.2, 0.8, 8.0]):
        mask = torch.zeros(1, 3)
        mask[0, token] = 1
        loss, _ = regular_loss(log_probs, torch.zeros(1, 3), advantages, CONFIG, mask)
        assert loss.item() == pytest.approx(expected, rel=1e-6)
    loss, metrics = regular_loss(log_probs, torch.zeros(1, 3), advantages, CONFIG)
    assert loss.item() == pytest.approx(7.6, rel=1e-6)
    assert metrics["clip_ratio"].item() == pytest.approx(2 / 3)


def test_on_policy_the_gradient_is_that_of_reinforce():
    log_probs = torch.tensor([[-1.0, -2.0, -0.3]], requires_grad=True)
    advantages = torch.tensor([[0.5, -3.0, 1.0]])
    loss, metrics = regular_loss(log_probs, log_probs.detach(), advantages, CONFIG)
    loss.backward()
    assert log_probs.grad.tolist()[0] == pytest.approx((-advantages).tolist()[0])
    assert metrics["clip_ratio"].item() == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["log_probs", "old_log_probs", "advantages"])
def test_a_masked_bad_value_leaks_into_nothing(bad, where):
    tensors = {
        "log_probs": torch.tensor([[-1.0, -2.0]]),
        "old_log_probs": torch.tensor([[-1.1, -2.0]]),
        "advantages": torch.tensor([[1.0, 1.0]]),
    }
    mask = torch.tensor([[1.0, 0.0]])
    clean, _ = regular_loss(**tensors, config=CONFIG, loss_mask=mask)
    tensors[where][0, 1] = bad
    tensors["log_probs"].requires_grad_()
    loss, metrics = regular_loss(**tensors, config=CONFIG, loss_mask=mask)
    loss.backward()
    assert loss.item() == clean.item()
    assert tensors["log_probs"].grad[0, 1] == 0
    assert tensors["log_probs"].grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())


def test_a_fully_masked_batch_has_loss_zero():
    loss, metrics = regular_loss(torch.ones(2, 2), torch.zeros(2, 2), torch.ones(2, 2), CONFIG, torch.zeros(2, 2))
    assert loss.item() == 0.0
    assert metrics["clip_ratio"].item() == 0.0


def test_an_extreme_ratio_stays_finite():
    log_probs = torch.tensor([[0.0, -500.0]], dtype=torch.bfloat16, requires_grad=True)
    loss, _ = regular_loss(log_probs, torch.tensor([[-500.0, 0.0]]), torch.tensor([[-1.0, 1.0]]), CONFIG)
    loss.backward()
    assert loss.isfinite()
    assert log_probs.grad.isfinite().all()


@given(
    st.lists(
        st.tuples(st.floats(-4, 0), st.floats(-4, 0), st.floats(-3, 3), st.booleans(), st.floats(0, 2)),
        min_size=1,
        max_size=16,
    ),
    st.floats(0.05, 0.5),
    st.floats(0.05, 0.9),
)
@settings(max_examples=60, deadline=None)
def test_loss_and_gradient_agree_with_a_loop(tokens, low, high):
    """Token by token: the gradient is -w·A·ρ where the free term is the lower, and 0 where the clip binds."""
    config = AlgorithmConfig(eps_clip_low=low, eps_clip_high=high)
    columns = [torch.tensor([column], dtype=torch.float64) for column in zip(*tokens, strict=True)]
    log_probs, old, advantages, mask, weights = columns
    log_probs.requires_grad_()
    loss, metrics = regular_loss(log_probs, old, advantages, config, mask, loss_weights=weights)
    loss.backward()
    total, clipped_count, gradient = 0.0, 0, []
    for logp, old_logp, advantage, shown, weight in tokens:
        ratio = math.exp(logp - old_logp)
        bounded = min(max(ratio, 1 - low), 1 + high)
        total += shown * weight * -min(ratio * advantage, bounded * advantage)
        binds = bounded * advantage < ratio * advantage
        clipped_count += binds and shown
        gradient.append(0.0 if binds or not shown else -weight * advantage * ratio)
    assert loss.item() == pytest.approx(total, rel=1e-9, abs=1e-12)
    assert metrics["clip_ratio"].item() == pytest.approx(clipped_count / max(1, sum(t[3] for t in tokens)))
    assert log_probs.grad.tolist()[0] == pytest.approx(gradient, rel=1e-9, abs=1e-12)
