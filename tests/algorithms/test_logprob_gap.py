"""How far trainer and engine are apart."""

import math

import pytest
import torch

from skyrl.algorithms.logprob_gap import logprob_gap

NAN = float("nan")


def test_the_gap_counts_trained_tokens_only():
    """Gaps .1, .3 and .5 on trained tokens: mean .3, variance .08/3. Sampler minus policy: .1, -.3 and -.5."""
    old = torch.tensor([[-1.1, -1.0], [-0.5, NAN]])
    sampled = torch.tensor([[-1.0, -1.3], [-1.0, -1.0]])
    metrics = logprob_gap(old, sampled, torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    gap, kl = "policy/rollout_train_logprobs_abs_diff", "policy/rollout_train_kl"
    k3 = sum(math.exp(-d) + d - 1 for d in (0.1, -0.3, -0.5)) / 3
    assert metrics == {
        f"{gap}_max": pytest.approx(0.5),
        f"{gap}_min": pytest.approx(0.1),
        f"{gap}_mean": pytest.approx(0.3),
        f"{gap}_std": pytest.approx((0.08 / 3) ** 0.5),
        f"{gap}_p50": pytest.approx(0.3),
        f"{gap}_p95": pytest.approx(0.48),
        f"{gap}_p99": pytest.approx(0.496),
        f"{kl}_k1": pytest.approx(-0.7 / 3),
        f"{kl}_k3": pytest.approx(k3),
    }


def test_nothing_is_measured_without_a_trained_token():
    assert logprob_gap(torch.full((1, 2), NAN), torch.zeros(1, 2), torch.zeros(1, 2)) == {}


def test_both_estimates_approach_the_divergence():
    """Sampler (.5, .5) against policy (.8, .2): KL = .5·ln(.5/.8) + .5·ln(.5/.2), on as many tokens of each kind."""
    old = torch.tensor([[0.8, 0.2]]).log()
    metrics = logprob_gap(old, torch.tensor([[0.5, 0.5]]).log(), torch.ones(1, 2))
    exact = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    assert metrics["policy/rollout_train_kl_k1"] == pytest.approx(exact, rel=1e-5)
    assert metrics["policy/rollout_train_kl_k3"] == pytest.approx(exact, rel=1e-5)
