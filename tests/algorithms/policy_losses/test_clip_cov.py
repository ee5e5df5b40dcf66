"""A few tokens of high covariance lose their gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.policy_losses.clip_cov import clip_cov_loss, shuffle_keys
from skyrl.algorithms.policy_losses.regular import regular_loss
from skyrl.config.algorithm import AlgorithmConfig, ClipCovConfig
from tests.algorithms.policy_losses.ragged import Batch, Token, make_batch, ragged_batches, run


def config(share: float, low: float = -1e9, high: float = 1e9) -> AlgorithmConfig:
    return AlgorithmConfig(clip_cov=ClipCovConfig(clip_ratio=share, clip_cov_lb=low, clip_cov_ub=high))


def random_tensors(seed: int, rows: int = 4, width: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(rows, width, generator=generator)
    return {
        "log_probs": log_probs.requires_grad_(),
        "old_log_probs": log_probs.detach().clone(),
        "advantages": torch.randn(rows, width, generator=generator),
    }


def drawn_tokens(seed: int, algorithm: AlgorithmConfig, **shape: int) -> torch.Tensor:
    tensors = random_tensors(seed, **shape)
    clip_cov_loss(**tensors, config=algorithm)[0].backward()
    return tensors["log_probs"].grad == 0


@given(ragged_batches())
@settings(max_examples=20, deadline=None)
def test_without_candidates_it_is_ppo(batch: Batch):
    loss, metrics, gradient = run(clip_cov_loss, batch, config(0.5, low=1e9))
    expected, _, expected_gradient = run(regular_loss, batch, config(0.5))
    assert loss.item() == expected.item()
    assert torch.equal(gradient, expected_gradient)
    assert metrics["clip_ratio"].item() == 0.0


@given(ragged_batches(), st.floats(0.001, 1.0), st.floats(-1.0, 0.5), st.floats(0.5, 2.0))
@settings(max_examples=60, deadline=None)
def test_it_is_ppo_without_the_drawn_tokens(batch: Batch, share: float, low: float, high: float):
    """A loop finds the candidates and says how many are drawn; which ones shows in the gradient."""
    tokens, count = batch.tokens, max(1, len(batch.tokens))
    mean_advantage = sum(token.advantage for token in tokens) / count
    mean_logp = sum(token.logp for token in tokens) / count

    def ppo(token: Token) -> tuple[float, float]:
        ratio = math.exp(token.logp - token.old)
        free, bound = ratio * token.advantage, min(max(ratio, 0.8), 1.2) * token.advantage
        return (-bound, 0.0) if bound < free else (-free, -free)  # the derivative of -ρA is -ρA

    def is_candidate(token: Token) -> bool:
        covariance = (token.advantage - mean_advantage) * (token.logp - mean_logp)
        return low < covariance < high and ppo(token)[1] != 0

    loss, metrics, gradient = run(clip_cov_loss, batch, config(share, low, high))
    total, drawn = 0.0, 0
    for token, slope in zip(tokens, gradient[batch.trained].tolist(), strict=True):
        value, expected_slope = ppo(token)
        if slope == 0 and expected_slope != 0:
            assert is_candidate(token)
            drawn += 1
        else:
            assert slope == pytest.approx(token.weight * expected_slope, rel=1e-9)
            total += token.weight * value
    assert drawn == min(max(1, math.floor(share * len(tokens))), sum(map(is_candidate, tokens)))
    assert loss.item() == pytest.approx(total, rel=1e-9, abs=1e-11)
    assert metrics["clip_ratio"].item() == pytest.approx(drawn / count)
    assert (gradient[~batch.trained] == 0).all()


@pytest.mark.parametrize(("share", "drawn"), [(1e-4, 1), (0.06, 1), (0.0625, 2), (0.5, 16), (1.0, 32)])
def test_the_number_of_drawn_tokens_is_rounded_down_but_at_least_one(share, drawn):
    assert drawn_tokens(0, config(share)).sum() == drawn


def test_every_candidate_is_drawn_equally_often():
    """32 places, 64,000 draws of one: 2,000 each, and a chi-square of 31 ± 7.9 when they are uniform."""
    log_probs = -torch.rand(64_000 * 4, 8, generator=torch.Generator().manual_seed(0))
    places = torch.bincount(shuffle_keys(log_probs).view(64_000, 32).argmin(dim=1), minlength=32)
    assert ((places - 2000.0).square() / 2000).sum() < 31 + 4 * 7.9


def test_pairs_of_tokens_are_drawn_independently():
    """Two of 16 places of two rows: each of the 120 pairs in 1/120 of the draws; chi-square 119 ± 15.4."""
    log_probs = -torch.rand(60_000 * 2, 8, generator=torch.Generator().manual_seed(1))
    first, second = shuffle_keys(log_probs).view(60_000, 16).topk(2, largest=False).indices.sort().values.unbind(1)
    pairs = torch.bincount(first * 16 + second, minlength=256).float()
    pairs = pairs.view(16, 16)[torch.ones(16, 16).triu(1).bool()]
    assert ((pairs - 500).square() / 500).sum() < 119 + 4 * 15.4


def test_tokens_of_probability_one_are_drawn_at_other_places_each_time():
    """Nearly all log-probs are exactly 0 in a confident model; one that differs moves the draw in its row."""
    log_probs = torch.zeros(500, 40)
    log_probs[:, 3] = -torch.rand(500, generator=torch.Generator().manual_seed(2))
    assert shuffle_keys(log_probs).argmin(dim=1).unique().numel() > 35


def test_the_draw_repeats_and_touches_no_random_state():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = drawn_tokens(5, config(0.1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(drawn_tokens(5, config(0.1)), first)


def test_other_micro_batches_draw_other_places():
    draws = {tuple(drawn_tokens(seed, config(0.1)).flatten().tolist()) for seed in range(50)}
    assert len(draws) == 50


def test_padding_and_the_order_of_rows_do_not_change_the_draw():
    log_probs = -torch.rand(5, 9, generator=torch.Generator().manual_seed(3))
    keys, order = shuffle_keys(log_probs), torch.tensor([3, 1, 4, 0, 2])
    assert torch.equal(shuffle_keys(log_probs[order]), keys[order])
    padded = torch.cat([torch.zeros(5, 4), log_probs], dim=1)
    assert torch.equal(shuffle_keys(padded)[:, 4:], keys)


def test_nothing_trained_gives_zero():
    batch = make_batch(0, [3, 2])
    batch.tensors["loss_mask"].zero_()
    loss, metrics, gradient = run(clip_cov_loss, batch, config(0.5))
    assert (loss.item(), metrics["clip_ratio"].item(), gradient.abs().sum().item()) == (0.0, 0.0, 0.0)
