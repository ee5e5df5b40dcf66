from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl.algorithms.advantages import compute_advantages_and_returns
from skyrl.algorithms.distillation import distillation_rewards
from skyrl.algorithms.kl import compute_approx_kl
from skyrl.algorithms.policy_losses import compute_policy_loss
from skyrl.config.algorithm import AlgorithmConfig


def test_a_token_that_the_teacher_finds_likelier_is_rewarded():
    student, teacher = torch.tensor([[-1.0, -2.0, -0.5]]), torch.tensor([[-1.5, -1.0, -0.5]])
    assert distillation_rewards(student, teacher, torch.ones(1, 3)).tolist() == [[-0.5, 1.0, 0.0]]


def test_what_the_mask_hides_is_exactly_zero():
    student, teacher = torch.tensor([[math.nan, -1.0, 0.0]]), torch.tensor([[-1.0, -math.inf, -2.0]])
    rewards = distillation_rewards(student, teacher, torch.tensor([[0, 0, 1]]))
    assert rewards.tolist() == [[0.0, 0.0, -2.0]]


@pytest.mark.parametrize("name", ["teacher_log_probs", "loss_mask"])
def test_another_shape_is_named(name: str):
    tensors = {
        "old_log_probs": torch.zeros(2, 3),
        "teacher_log_probs": torch.zeros(2, 3),
        "loss_mask": torch.ones(2, 3),
    }
    tensors[name] = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=rf"{name} has shape \(2, 4\) but old_log_probs has shape \(2, 3\)"):
        distillation_rewards(**tensors)


log_probs = st.lists(st.floats(-30, 0, width=32), min_size=1, max_size=8)


@given(st.data(), log_probs)
def test_it_is_the_negative_k1_estimate_of_each_token(data: st.DataObject, student: list[float]):
    same = {"min_size": len(student), "max_size": len(student)}
    teacher = data.draw(st.lists(st.floats(-30, 0, width=32), **same))
    mask = data.draw(st.lists(st.integers(0, 1), **same))
    rewards = distillation_rewards(*(torch.tensor([row], dtype=torch.float64) for row in (student, teacher, mask)))
    expected = [(t - s) if m else 0.0 for s, t, m in zip(student, teacher, mask, strict=True)]
    assert rewards.tolist() == [pytest.approx(expected)]
    kl = compute_approx_kl(torch.tensor([student]), torch.tensor([teacher]), torch.tensor([mask]), "k1")
    assert torch.equal(rewards.float(), -kl)


def test_the_expected_gradient_is_that_of_the_reverse_kl():
    """Over all three tokens of a vocabulary, each weighed by how often the student samples it."""
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([1.0, 0.5, -0.5], dtype=torch.float64), dim=0)
    student = torch.log_softmax(logits, dim=0)
    (student.exp() * (student - teacher)).sum().backward()
    reverse_kl, logits.grad = logits.grad, None

    now = torch.log_softmax(logits, dim=0).unsqueeze(1)  # each token is a row of one token
    old, mask = now.detach(), torch.ones(3, 1, dtype=torch.float64)
    config = AlgorithmConfig(policy_loss_type="importance_sampling", advantage_estimator="no_op")
    rewards = distillation_rewards(old, teacher.unsqueeze(1), mask)
    advantages, _ = compute_advantages_and_returns(rewards, mask, ["a", "b", "c"], "no_op", config)
    loss, _ = compute_policy_loss(
        "importance_sampling",
        log_probs=now,
        old_log_probs=old,
        advantages=advantages,
        config=config,
        loss_mask=mask,
        loss_weights=old.exp(),
    )
    loss.backward()
    assert torch.allclose(logits.grad, reverse_kl, atol=1e-12)
