"""gae and reinforce++: recursions over the tokens of a row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.advantages import compute_advantages_and_returns
from skyrl.algorithms.masked import masked_whiten
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.errors import ConfigError


def estimate(name, rewards, mask=None, **options):
    rewards = torch.tensor(rewards)
    mask = torch.ones_like(rewards) if mask is None else torch.tensor(mask)
    return compute_advantages_and_returns(
        rewards, mask, [str(i) for i in range(len(rewards))], name, AlgorithmConfig(), **options
    )


@pytest.mark.parametrize(
    ("gamma", "lambd", "raw", "expected_returns"),
    [(1.0, 1.0, [0.8, 0.6, 0.4], [1.0, 1.0, 1.0]), (0.9, 0.5, [0.304, 0.32, 0.4], [0.504, 0.72, 1.0])],
)
def test_gae_has_the_spec_values(gamma, lambd, raw, expected_returns):
    values = torch.tensor([[0.2, 0.4, 0.6]])
    advantages, returns = estimate("gae", [[0.0, 0.0, 1.0]], values=values, gamma=gamma, lambd=lambd)
    assert returns.tolist()[0] == pytest.approx(expected_returns)
    assert (returns - values).tolist()[0] == pytest.approx(raw)
    assert advantages.tolist()[0] == pytest.approx(masked_whiten(torch.tensor([raw]), torch.ones(1, 3)).tolist()[0])
    assert advantages.mean().item() == pytest.approx(0.0, abs=1e-6)


def test_gae_without_values_names_the_way_out():
    with pytest.raises(ConfigError, match=r"trainer\.critic\.model\.path"):
        estimate("gae", [[1.0]])


def test_reinforce_plus_plus_has_the_spec_values():
    advantages, returns = estimate("reinforce++", [[0.0, 0, 2], [0, 1, 0]], gamma=0.5)
    assert returns.tolist() == [[0.5, 1.0, 2.0], [0.5, 1.0, 0.0]]
    assert advantages.tolist() == masked_whiten(returns, torch.ones(2, 3)).tolist()


@pytest.mark.parametrize("name", ["gae", "reinforce++"])
def test_padding_on_the_left_reaches_nothing(name):
    nan = float("nan")
    padded = estimate(
        name, [[nan, 1.0, 2.0], [nan, nan, 3.0]], [[0, 1, 1], [0, 0, 1]], values=torch.tensor([[nan, 0.5, 0.1]] * 2)
    )
    for tensor in padded:
        assert tensor.isfinite().all()
        assert tensor[0, 0] == tensor[1, 0] == tensor[1, 1] == 0


@pytest.mark.parametrize("name", ["gae", "reinforce++"])
def test_one_trained_token_does_not_crash(name):
    advantages, returns = estimate(name, [[0.0, 5.0]], [[0, 1]], values=torch.zeros(1, 2))
    assert advantages.tolist() == [[0.0, 0.0]]
    assert returns.tolist() == [[0.0, 5.0]]


@st.composite
def batches(draw):
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    lengths = [draw(st.integers(1, width)) for _ in range(rows)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    rewards = torch.randn(rows, width, generator=generator, dtype=torch.float64) * mask
    values = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return rewards, mask, values, draw(st.floats(0, 1)), draw(st.floats(0, 1))


@settings(max_examples=50, deadline=None)
@given(batches())
def test_gae_agrees_with_the_definition(batch):
    """A_t as the explicit sum Σ_k (γλ)^k δ_{t+k}, token by token."""
    rewards, mask, values, gamma, lambd = batch
    rows, width = rewards.shape
    raw = torch.zeros(rows, width, dtype=torch.float64)
    for i in range(rows):
        delta = [
            rewards[i, t] + gamma * (values[i, t + 1] if t + 1 < width else 0.0) - values[i, t] for t in range(width)
        ]
        for t in range(width):
            raw[i, t] = sum((gamma * lambd) ** k * delta[t + k] for k in range(width - t)) * mask[i, t]
    advantages, returns = compute_advantages_and_returns(
        rewards, mask, ["g"] * rows, "gae", AlgorithmConfig(), values=values, gamma=gamma, lambd=lambd
    )
    assert torch.allclose(returns, (raw + values) * mask, atol=1e-9)
    assert torch.allclose(advantages, masked_whiten(raw, mask), atol=1e-7)


@settings(max_examples=50, deadline=None)
@given(batches(), st.integers(0, 2**31))
def test_reinforce_plus_plus_agrees_with_the_definition(batch, seed):
    """The sum to go ends at the next token that the mask hides; the mask has holes."""
    rewards, mask, _, gamma, _ = batch
    mask = mask * (torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) > 0.2)
    rows, width = rewards.shape
    to_go = torch.zeros(rows, width, dtype=torch.float64)
    for i in range(rows):
        for t in range(width):
            end = next((k for k in range(t, width) if not mask[i, k]), width)
            to_go[i, t] = sum(gamma ** (k - t) * rewards[i, k] for k in range(t, end))
    advantages, returns = compute_advantages_and_returns(
        rewards, mask, ["g"] * rows, "reinforce++", AlgorithmConfig(), gamma=gamma
    )
    assert torch.allclose(returns, to_go, atol=1e-9)
    assert torch.allclose(advantages, masked_whiten(to_go, mask), atol=1e-7)


def test_a_hole_cuts_reinforce_plus_plus():
    """Nothing passes the masked third token; 100 and NaN stand there."""
    for hidden in (100.0, float("nan")):
        _, returns = estimate("reinforce++", [[1.0, 2.0, hidden, 4.0]], [[1, 1, 0, 1]], gamma=0.5)
        assert returns.tolist() == [[2.0, 2.0, 0.0, 4.0]]


def test_gae_reads_on_behind_a_hole():
    """γ = λ = 1: the return of a token is the sum of all later rewards, those of masked tokens included."""
    values = torch.tensor([[0.5, 0.25, 0.75, 0.5]])
    _, returns = estimate("gae", [[0.0, 0.0, 2.0, 1.0]], [[1, 1, 0, 1]], values=values)
    assert returns.tolist() == [[3.0, 3.0, 0.0, 1.0]]


def test_nan_in_a_hole_counts_as_zero_for_gae():
    nan = float("nan")
    holed = torch.tensor([[0.5, nan, 0.75]])
    zeroed = torch.tensor([[0.5, 0.0, 0.75]])
    for with_nan, without in zip(
        estimate("gae", [[0.0, nan, 1.0]], [[1, 0, 1]], values=holed, gamma=0.5),
        estimate("gae", [[0.0, 0.0, 1.0]], [[1, 0, 1]], values=zeroed, gamma=0.5),
        strict=True,
    ):
        assert torch.equal(with_nan, without)


@pytest.mark.parametrize("name", ["gae", "reinforce++"])
def test_equal_rewards_to_go_whiten_to_exactly_zero(name):
    reward = 1 / 3
    advantages, _ = estimate(name, [[0.0, 0.0, reward]] * 7, values=torch.zeros(7, 3))
    assert not advantages.any()
