"""REINFORCE with importance ratios to the sampler."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl.algorithms.policy_losses import PolicyLossRegistry, compute_policy_loss
from skyrl.algorithms.policy_losses.rollout_is import rollout_is_loss
from skyrl.config.algorithm import AlgorithmConfig

CONFIG = AlgorithmConfig(eps_clip_low=0.2, eps_clip_high=0.2)


def test_ratios_outside_the_range_count_nothing():
    sampler = torch.tensor([[-1.0, -1.0, -1.0]], dtype=torch.float64)
    log_probs = (sampler + torch.tensor([[0.7, 1.1, 1.3]], dtype=torch.float64).log()).requires_grad_()
    loss, metrics = rollout_is_loss(log_probs, None, torch.ones(1, 3), CONFIG, rollout_logprobs=sampler)
    loss.backward()
    assert log_probs.grad.tolist()[0] == pytest.approx([0.0, -1.1, 0.0])
    assert loss.item() == pytest.approx(-1.1 * (-1 + math.log(1.1)))
    assert metrics["clip_ratio"].item() == pytest.approx(2 / 3)


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.2), (0.2, 0.0)])
def test_a_ratio_on_the_bound_is_outside(low, high):
    """Ratio 1 is exact: a range (1, 1.2) or (0.8, 1) does not hold it."""
    log_probs = torch.tensor([[-1.0]], requires_grad=True)
    config = AlgorithmConfig(eps_clip_low=low, eps_clip_high=high)
    loss, metrics = rollout_is_loss(log_probs, None, torch.ones(1, 1), config, rollout_logprobs=log_probs.detach())
    loss.backward()
    assert (loss.item(), log_probs.grad.item(), metrics["clip_ratio"].item()) == (0.0, 0.0, 1.0)


def test_on_policy_the_gradient_is_that_of_reinforce():
    log_probs = torch.tensor([[-1.0, -2.0, -0.3]], requires_grad=True)
    advantages = torch.tensor([[0.5, -3.0, 1.0]])
    loss, metrics = rollout_is_loss(log_probs, None, advantages, CONFIG, rollout_logprobs=log_probs.detach())
    loss.backward()
    assert log_probs.grad.tolist()[0] == pytest.approx((-advantages).tolist()[0])
    assert metrics["clip_ratio"].item() == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["log_probs", "rollout_logprobs", "advantages"])
def test_a_masked_bad_value_leaks_into_nothing(bad, where):
    tensors = {
        "log_probs": torch.tensor([[-1.0, -2.0]]),
        "rollout_logprobs": torch.tensor([[-1.1, -2.0]]),
        "advantages": torch.tensor([[1.0, 1.0]]),
    }
    mask = torch.tensor([[1.0, 0.0]])
    clean, _ = rollout_is_loss(**tensors, old_log_probs=None, config=CONFIG, loss_mask=mask)
    tensors[where][0, 1] = bad
    tensors["log_probs"].requires_grad_()
    loss, metrics = rollout_is_loss(**tensors, old_log_probs=None, config=CONFIG, loss_mask=mask)
    loss.backward()
    assert loss.item() == clean.item()
    assert tensors["log_probs"].grad[0, 1] == 0
    assert all(value.isfinite() for value in metrics.values())


def test_an_extreme_ratio_stays_finite():
    log_probs = torch.tensor([[0.0, -500.0]], dtype=torch.bfloat16, requires_grad=True)
    sampler = torch.tensor([[-500.0, 0.0]])
    loss, _ = rollout_is_loss(log_probs, None, torch.ones(1, 2), CONFIG, rollout_logprobs=sampler)
    loss.backward()
    assert loss.isfinite()
    assert log_probs.grad.isfinite().all()


def test_it_reads_the_samplers_log_probs_and_no_old_ones():
    traits = PolicyLossRegistry.traits("rollout_is")
    assert (traits.needs_old_logprobs, traits.needs_rollout_logprobs) == (False, True)
    arguments = {
        "log_probs": torch.zeros(1, 1),
        "old_log_probs": None,
        "advantages": torch.ones(1, 1),
        "config": CONFIG,
    }
    with pytest.raises(ValueError, match="needs rollout_logprobs"):
        compute_policy_loss("rollout_is", **arguments)
    with pytest.raises(ValueError, match="needs rollout_logprobs"):
        rollout_is_loss(**arguments)


@given(
    st.lists(
        st.tuples(st.floats(-4, 0), st.floats(-4, 0), st.floats(-3, 3), st.booleans(), st.floats(0, 2)),
        min_size=1,
        max_size=16,
    ),
    st.floats(0.05, 0.9),
    st.floats(0.05, 3.0),
)
def test_loss_and_gradient_agree_with_a_loop(tokens, low, high):
    config = AlgorithmConfig(eps_clip_low=low, eps_clip_high=high)
    columns = [torch.tensor([column], dtype=torch.float64) for column in zip(*tokens, strict=True)]
    log_probs, sampler, advantages, mask, weights = columns
    log_probs.requires_grad_()
    loss, metrics = rollout_is_loss(log_probs, None, advantages, config, mask, sampler, loss_weights=weights)
    loss.backward()
    total, outside, gradient = 0.0, 0, []
    for now, sampled, advantage, shown, weight in tokens:
        ratio = math.exp(now - sampled)
        factor = ratio if 1 - low < ratio < 1 + high else 0.0
        outside += shown and factor == 0.0
        total += -shown * weight * factor * advantage * now
        gradient.append(-shown * weight * factor * advantage)
    assert loss.item() == pytest.approx(total, rel=1e-9, abs=1e-12)
    assert metrics["clip_ratio"].item() == pytest.approx(outside / max(1, sum(t[3] for t in tokens)))
    assert log_probs.grad.tolist()[0] == pytest.approx(gradient, rel=1e-9, abs=1e-12)
