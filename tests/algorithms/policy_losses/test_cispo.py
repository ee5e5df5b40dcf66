"""Clamped importance weights that keep every token's gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.policy_losses.cispo import anchors_on_old, anchors_on_rollout, cispo_loss
from skyrl.config.algorithm import AlgorithmConfig, CISPOConfig
from tests.algorithms.policy_losses.ragged import Batch, assert_same, ragged_batches


def config(anchor: str, low: float = 1.0, high: float = 4.0) -> AlgorithmConfig:
    return AlgorithmConfig(cispo=CISPOConfig(cispo_anchor=anchor, cispo_eps_clip_low=low, cispo_eps_clip_high=high))


def test_the_spec_values_anchored_on_the_rollout():
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    rollout, ones = torch.tensor([[-1.5, -4.0]]), torch.ones(1, 2)
    for token, expected in enumerate([1.648721, 10.0]):
        only = torch.nn.functional.one_hot(torch.tensor([token]), 2)
        loss, _ = cispo_loss(log_probs, None, ones, config("rollout"), only, rollout)
        assert loss.item() == pytest.approx(expected, rel=1e-6)
    loss, metrics = cispo_loss(log_probs, None, ones, config("rollout"), ones, rollout)
    loss.backward()
    assert log_probs.grad.tolist()[0] == pytest.approx([-1.648721, -5.0], rel=1e-6)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "clip_ratio": 0.5,
            "cispo/ratio_mean": (1.648721 + 7.389056) / 2,
            "cispo/ratio_clamped_mean": (1.648721 + 5.0) / 2,
            "cispo/ratio_max": 7.389056,
            "cispo/ratio_min": 1.648721,
        },
        rel=1e-6,
    )


def test_on_policy_the_gradient_is_that_of_reinforce():
    log_probs, advantages = torch.tensor([[-1.0, -2.0]], requires_grad=True), torch.tensor([[0.5, -3.0]])
    cispo_loss(log_probs, log_probs.detach(), advantages, config("old"))[0].backward()
    assert log_probs.grad.tolist() == (-advantages).tolist()


def test_extremes_are_those_of_trained_tokens():
    log_probs = torch.tensor([[3.0, 0.5, 0.25, -3.0]])
    _, metrics = cispo_loss(
        log_probs, torch.zeros(1, 4), torch.ones(1, 4), config("old"), torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    )
    assert metrics["cispo/ratio_max"].item() == pytest.approx(math.exp(0.5))
    assert metrics["cispo/ratio_min"].item() == pytest.approx(math.exp(0.25))


def test_without_trained_tokens_the_extremes_are_0():
    _, metrics = cispo_loss(torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2), config("old"), torch.zeros(2, 2))
    assert {value.item() for value in metrics.values()} == {0.0}


@pytest.mark.parametrize("anchor", ["old", "rollout"])
def test_a_missing_anchor_is_named(anchor):
    tensors = {"old_log_probs": torch.zeros(1, 1), "rollout_logprobs": torch.zeros(1, 1)}
    tensors["old_log_probs" if anchor == "old" else "rollout_logprobs"] = None
    with pytest.raises(ValueError, match=f"cispo_anchor={anchor}"):
        cispo_loss(torch.zeros(1, 1), advantages=torch.ones(1, 1), config=config(anchor), **tensors)


def test_the_anchor_decides_what_is_needed():
    assert anchors_on_old(config("old"))
    assert not anchors_on_rollout(config("old"))
    assert not anchors_on_old(config("rollout"))
    assert anchors_on_rollout(config("rollout"))


@given(ragged_batches(), st.sampled_from(["old", "rollout"]), st.floats(0.05, 1.0), st.floats(0.05, 2.0))
@settings(max_examples=50, deadline=None)
def test_it_agrees_with_a_loop_and_autograd(batch: Batch, anchor: str, low: float, high: float):
    def ratio_of(token):
        return math.exp(token.logp - (token.old if anchor == "old" else token.rollout))

    def clamp(ratio):
        return min(max(ratio, 1 - low), 1 + high)

    def loop(batch: Batch):
        ratios = [ratio_of(token) for token in batch.tokens]
        count = max(1, len(ratios))
        total = sum(-clamp(ratio_of(token)) * token.advantage * token.logp * token.weight for token in batch.tokens)
        return total, {
            "clip_ratio": sum(not 1 - low <= ratio <= 1 + high for ratio in ratios) / count,
            "cispo/ratio_mean": sum(ratios) / count,
            "cispo/ratio_clamped_mean": sum(map(clamp, ratios)) / count,
            "cispo/ratio_max": max(ratios, default=0.0),
            "cispo/ratio_min": min(ratios, default=0.0),
        }

    def formula(logp, old, rollout, advantage):
        weight = (logp.detach() - (old if anchor == "old" else rollout)).exp().clamp(1 - low, 1 + high)
        return -weight * advantage * logp

    assert_same(cispo_loss, batch, config(anchor, low, high), loop, formula)
