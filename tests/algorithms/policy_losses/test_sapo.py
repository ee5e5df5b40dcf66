"""A smooth gate instead of a clip."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.policy_losses.reduction_advice import advise_sequence_mean
from skyrl.algorithms.policy_losses.sapo import sapo_loss
from skyrl.config.algorithm import AlgorithmConfig, SAPOConfig
from tests.algorithms.policy_losses.ragged import Batch, assert_same, make_batch, per_token, ragged_batches, run


def config(tau_pos: float, tau_neg: float) -> AlgorithmConfig:
    return AlgorithmConfig(sapo=SAPOConfig(tau_pos=tau_pos, tau_neg=tau_neg), loss_reduction="sequence_mean")


@pytest.mark.parametrize(
    ("tau", "ratio", "gate"), [(1.0, 1.0, 2.0), (1.0, 1.5, 2.489837), (1.0, 0.5, 1.510163), (1.05, 1.5, 2.393585)]
)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_gate_has_the_spec_values(tau, ratio, gate, advantage):
    other = 7.0  # the temperature of the other sign does not matter
    settings_ = config(tau, other) if advantage > 0 else config(other, tau)
    loss, metrics = sapo_loss(
        torch.tensor([[math.log(ratio)]]), torch.zeros(1, 1), torch.tensor([[advantage]]), settings_
    )
    assert loss.item() == pytest.approx(-gate * advantage, rel=1e-6)
    assert metrics["clip_ratio"].item() == 0.0


@pytest.mark.parametrize("tau", [0.3, 1.0, 1.05, 4.0])
def test_on_policy_the_gradient_is_that_of_reinforce_for_every_temperature(tau):
    log_probs, advantages = torch.tensor([[-1.0, -2.0]], requires_grad=True), torch.tensor([[0.5, -3.0]])
    sapo_loss(log_probs, log_probs.detach(), advantages, config(tau, tau))[0].backward()
    assert log_probs.grad.tolist()[0] == pytest.approx((-advantages).tolist()[0])


@given(ragged_batches(), st.floats(0.2, 4.0), st.floats(0.2, 4.0))
@settings(max_examples=40, deadline=None)
def test_it_agrees_with_a_loop_and_autograd(batch: Batch, tau_pos: float, tau_neg: float):
    def token_loss(token):
        tau = tau_pos if token.advantage > 0 else tau_neg
        ratio = math.exp(token.logp - token.old)
        return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * token.advantage

    def formula(logp, old, rollout, advantage):
        tau = torch.tensor([tau_pos if a > 0 else tau_neg for a in advantage.tolist()], dtype=torch.float64)
        return -4 / tau / (1 + (-tau * ((logp - old).exp() - 1)).exp()) * advantage

    loop = per_token(token_loss, lambda token: False)
    assert_same(sapo_loss, batch, config(tau_pos, tau_neg), loop, formula)


def test_it_warns_once_about_another_reduction(caplog):
    advise_sequence_mean.cache_clear()
    for _ in range(2):
        run(sapo_loss, make_batch(0, [2, 3]), AlgorithmConfig(loss_reduction="prompt_mean"))
    assert len(caplog.records) == 1
