"""Tokens dropped by how far their probability moved."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.policy_losses.dppo import dppo_loss
from skyrl.config.algorithm import AlgorithmConfig, DPPOConfig
from skyrl.errors import ConfigError
from tests.algorithms.policy_losses.ragged import Batch, assert_same, per_token, ragged_batches


def config(kind: str, low: float = 0.2, high: float = 0.2) -> AlgorithmConfig:
    return AlgorithmConfig(dppo=DPPOConfig(dppo_type=kind, delta_low=low, delta_high=high))


def is_dropped(probability: float, behaviour: float, advantage: float, algorithm: AlgorithmConfig) -> bool:
    loss, metrics = dppo_loss(
        torch.tensor([[math.log(probability)]]),
        None,
        torch.tensor([[advantage]]),
        algorithm,
        rollout_logprobs=torch.tensor([[math.log(behaviour)]]),
    )
    expected = 0.0 if metrics["clip_ratio"].item() else -probability / behaviour * advantage
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    return bool(metrics["clip_ratio"].item())


@pytest.mark.parametrize("kind", ["binary_tv", "binary_kl"])
def test_a_token_is_dropped_only_where_the_advantage_pushes_on(kind):
    algorithm = config(kind, low=0.05, high=0.05) if kind == "binary_kl" else config(kind)
    assert is_dropped(0.9, 0.6, 1.0, algorithm)
    assert not is_dropped(0.9, 0.6, -1.0, algorithm)
    assert is_dropped(0.3, 0.6, -1.0, algorithm)
    assert not is_dropped(0.3, 0.6, 1.0, algorithm)
    assert not is_dropped(0.9, 0.3, 0.0, algorithm)


@pytest.mark.parametrize(
    ("kind", "probability", "advantage", "divergence"),
    [
        ("binary_tv", 0.9, 1.0, 0.3),
        ("binary_tv", 0.3, -1.0, 0.3),
        ("binary_kl", 0.9, 1.0, 0.311239),  # .6 ln(.6/.9) + .4 ln(.4/.1)
        ("binary_kl", 0.3, -1.0, 0.192042),  # .6 ln(.6/.3) + .4 ln(.4/.7)
    ],
)
def test_the_bound_is_on_the_divergence_and_has_a_side(kind, probability, advantage, divergence):
    below, above = divergence - 1e-5, divergence + 1e-5
    rises = advantage > 0
    tight, loose = (config(kind, 9.0, below), config(kind, 0.0, above)) if rises else (
        config(kind, below, 9.0),
        config(kind, above, 0.0),
    )  # fmt: skip
    assert is_dropped(probability, 0.6, advantage, tight)
    assert not is_dropped(probability, 0.6, advantage, loose)


@pytest.mark.parametrize("kind", ["binary_tv", "binary_kl"])
def test_certain_and_impossible_tokens_are_finite(kind):
    """Log-probs of 0, a little above 0 by rounding, and -inf."""
    log_probs = torch.tensor([[0.0, 1e-7, 0.0, -200.0]], requires_grad=True)
    rollout = torch.tensor([[0.0, 1e-7, -200.0, 0.0]])
    loss, metrics = dppo_loss(log_probs, None, torch.tensor([[1.0, 1.0, 1.0, -1.0]]), config(kind), None, rollout)
    loss.backward()
    assert loss.item() == pytest.approx(-2.0)
    assert log_probs.grad.tolist()[0] == pytest.approx([-1.0, -1.0, 0.0, 0.0])
    assert metrics["clip_ratio"].item() == 0.5
    never_sampled = torch.tensor([[float("-inf")]])
    loss, metrics = dppo_loss(torch.tensor([[-0.1]]), None, torch.ones(1, 1), config(kind), None, never_sampled)
    assert (loss.item(), metrics["clip_ratio"].item()) == (0.0, 1.0)


def test_old_log_probs_stand_in_for_missing_rollout_ones():
    now, before, ones = torch.tensor([[-1.0, -0.1]]), torch.tensor([[-1.1, -2.0]]), torch.ones(1, 2)
    by_old, _ = dppo_loss(now, before, ones, config("binary_tv"))
    by_rollout, _ = dppo_loss(now, torch.full((1, 2), -9.0), ones, config("binary_tv"), None, before)
    assert by_old.item() == by_rollout.item() == pytest.approx(-math.exp(0.1))
    with pytest.raises(ValueError, match="rollout_logprobs"):
        dppo_loss(now, None, ones, config("binary_tv"))


def test_an_unknown_divergence_is_named():
    with pytest.raises(ConfigError, match="dppo_type='tv'"):
        dppo_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), config("tv"))


@given(ragged_batches(), st.sampled_from(["binary_tv", "binary_kl"]), st.floats(0.001, 0.3), st.floats(0.001, 0.3))
@settings(max_examples=50, deadline=None)
def test_it_agrees_with_a_loop_and_autograd(batch: Batch, kind: str, low: float, high: float):
    def dropped(token):
        p, mu = math.exp(token.logp), math.exp(token.rollout)
        if kind == "binary_tv":
            return (token.advantage > 0 and p - mu > high) or (token.advantage < 0 and mu - p > low)
        rest = (1 - mu) * math.log((1 - mu + 1e-8) / (1 - p + 1e-8))
        divergence = mu * (math.log(mu) - token.logp) + rest
        rising, falling = token.advantage > 0 and p > mu, token.advantage < 0 and p < mu
        return (rising and divergence > high) or (falling and divergence > low)

    def token_loss(token):
        return 0.0 if dropped(token) else -math.exp(token.logp - token.rollout) * token.advantage

    def formula(logp, old, rollout, advantage):
        kept = torch.tensor([not dropped(token) for token in batch.tokens], dtype=torch.float64)
        return -(logp.exp() / rollout.exp()) * advantage * kept

    assert_same(dppo_loss, batch, config(kind, low, high), per_token(token_loss, dropped), formula)
