"""A KL penalty on the tokens of highest covariance."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from skyrl.algorithms.policy_losses.importance_sampling import importance_sampling_loss
from skyrl.algorithms.policy_losses.kl_cov import kl_cov_loss
from skyrl.config.algorithm import AlgorithmConfig, KLCovConfig
from tests.algorithms.policy_losses.ragged import Batch, assert_same, make_batch, ragged_batches, run


def config(share: float, coef: float = 1.0) -> AlgorithmConfig:
    return AlgorithmConfig(kl_cov=KLCovConfig(kl_cov_frac=share, ppo_kl_coef=coef))


def test_the_token_of_highest_covariance_is_punished():
    """Mean advantage 0, mean log-prob -4.75/3: covariances .5833, 0, .6667; the fourth does not train."""
    log_probs = torch.tensor([[-1.0, -1.5, -2.25, -9.0]], requires_grad=True)
    old = torch.tensor([[-1.2, -1.5, -2.0, 0.0]])
    loss, metrics = kl_cov_loss(
        log_probs, old, torch.tensor([[1.0, 0.0, -1.0, 99.0]]), config(0.34, coef=3.0), torch.tensor([[1, 1, 1, 0]])
    )
    loss.backward()
    assert loss.item() == pytest.approx(-math.exp(0.2) + math.exp(-0.25) + 3 * 0.25)
    assert log_probs.grad.tolist()[0] == pytest.approx([-math.exp(0.2), 0.0, math.exp(-0.25) - 3.0, 0.0])
    assert metrics["clip_ratio"].item() == 0.0


@given(ragged_batches(), st.floats(0.01, 1.0), st.floats(0.0, 3.0))
@settings(max_examples=60, deadline=None)
def test_it_agrees_with_a_loop_and_autograd(batch: Batch, share: float, coef: float):
    tokens = batch.tokens
    mean_advantage = sum(token.advantage for token in tokens) / max(1, len(tokens))
    mean_logp = sum(token.logp for token in tokens) / max(1, len(tokens))
    covariances = [(token.advantage - mean_advantage) * (token.logp - mean_logp) for token in tokens]
    ranked = sorted(range(len(tokens)), key=lambda i: -covariances[i])
    count = max(1, math.floor(share * len(tokens)))
    last, following = ranked[count - 1 : count], ranked[count : count + 1]
    assume(not following or covariances[last[0]] - covariances[following[0]] > 1e-9)  # two tokens always tie
    punished = set(ranked[:count])

    def loop(batch: Batch):
        total = 0.0
        for i, token in enumerate(tokens):
            penalty = coef * abs(token.logp - token.old) if i in punished else 0.0
            total += token.weight * (penalty - math.exp(token.logp - token.old) * token.advantage)
        return total, {"clip_ratio": 0.0}

    def formula(logp, old, rollout, advantage):
        marks = torch.tensor([float(i in punished) for i in range(len(tokens))], dtype=torch.float64)
        return -(logp - old).exp() * advantage + coef * marks * ((logp - old) ** 2).sqrt()

    assert_same(kl_cov_loss, batch, config(share, coef), loop, formula)


def test_equal_covariances_do_not_raise_the_number_of_punished_tokens():
    """On 10 equal tokens every covariance is 0; exactly 3 get the penalty of 0.5."""
    log_probs, ones = torch.full((2, 5), -1.0), torch.ones(2, 5)
    loss, _ = kl_cov_loss(log_probs, torch.full((2, 5), -1.5), ones, config(0.3))
    assert loss.item() == pytest.approx(-10 * math.exp(0.5) + 3 * 0.5, rel=1e-6)


@pytest.mark.parametrize("share", [1e-6, 0.2, 1.0])
def test_nothing_trained_gives_zero(share):
    batch = make_batch(0, [3, 2])
    batch.tensors["loss_mask"].zero_()
    loss, metrics, gradient = run(kl_cov_loss, batch, config(share))
    assert (loss.item(), metrics["clip_ratio"].item(), gradient.abs().sum().item()) == (0.0, 0.0, 0.0)


def test_without_a_penalty_it_is_importance_sampling():
    batch = make_batch(3, [4, 2, 5])
    loss, _, gradient = run(kl_cov_loss, batch, config(0.5, coef=0.0))
    expected, _, expected_gradient = run(importance_sampling_loss, batch, config(0.5))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-12)


@pytest.mark.parametrize("share", [0.001, 0.2, 0.9])
def test_the_guess_from_a_sample_finds_the_highest_of_many_tokens(share: float):
    draw = torch.Generator().manual_seed(0)
    advantages, log_probs = (torch.randn(40, 300, generator=draw, dtype=torch.float64) for _ in range(2))
    log_probs.requires_grad_()
    # The gradient is -e·A, plus 50 where a token is punished.
    mask = torch.rand(40, 300, generator=draw).round()
    old = log_probs.detach() - 1.0
    kl_cov_loss(log_probs, old, advantages, config(share, coef=50.0), mask)[0].backward()
    shown = mask.bool()
    score = (advantages - advantages[shown].mean()) * (log_probs.detach() - log_probs.detach()[shown].mean())
    expected = score[shown].sort(descending=True).values[: math.floor(share * int(shown.sum()))]
    punished = log_probs.grad + math.e * advantages * mask > 25.0
    assert torch.equal(score[punished & shown].sort(descending=True).values, expected)
    assert not punished[~shown].any()
