"""grpo and rloo: one advantage a rollout, from its group."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl.algorithms.advantages import compute_advantages_and_returns
from skyrl.config.algorithm import AlgorithmConfig


def estimate(name, scores, uids=None, **options):
    """Advantage of each row, with the score on the last of three tokens."""
    rewards = torch.zeros(len(scores), 3)
    rewards[:, -1] = torch.tensor(scores)
    advantages, returns = compute_advantages_and_returns(
        rewards, torch.ones(len(scores), 3), uids or ["g"] * len(scores), name, AlgorithmConfig(), **options
    )
    assert torch.equal(advantages, returns)
    assert (advantages == advantages[:, :1]).all()
    return advantages[:, 0].tolist()


def test_grpo_has_the_spec_values():
    assert estimate("grpo", [1.0, 0, 0, 1]) == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6)
    assert estimate("grpo", [1.0, 0, 0, 1], grpo_norm_by_std=False) == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize("score", [0.1, 1 / 3, -7.3, 1e6, 1e-8])
@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_equal_scores_give_exactly_zero(name, size, score):
    assert estimate(name, [score] * size) == [0.0] * size


def test_a_grpo_group_of_one_keeps_its_score():
    assert estimate("grpo", [0.7]) == pytest.approx([0.7 / (1 + 1e-6)])
    assert estimate("grpo", [0.7], grpo_norm_by_std=False) == pytest.approx([0.7])


def test_rloo_has_the_spec_values():
    assert estimate("rloo", [4.0, 1, 1]) == [3.0, -1.5, -1.5]


def test_an_rloo_group_of_one_gets_zero_and_a_warning(caplog):
    assert estimate("rloo", [4.0]) == [0.0]
    assert "1 groups hold one rollout only" in caplog.text


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_rewards_on_several_tokens_are_summed(name):
    rewards = torch.tensor([[0.25, 0.5, 0.25], [0.0, 0.0, 0.0], [0.5, 0.0, 0.5]])
    advantages, _ = compute_advantages_and_returns(rewards, torch.ones(3, 3), list("aaa"), name, AlgorithmConfig())
    assert advantages[:, 0].tolist() == pytest.approx(estimate(name, [1.0, 0.0, 1.0]))


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_only_response_tokens_carry_an_advantage(name):
    mask = torch.tensor([[0, 1, 1], [0, 0, 1]])
    rewards = torch.tensor([[float("nan"), 0.0, 1.0], [float("inf"), float("nan"), 0.0]])
    advantages, _ = compute_advantages_and_returns(rewards, mask, ["a", "a"], name, AlgorithmConfig())
    assert advantages.isfinite().all()
    assert ((advantages != 0) == mask.bool()).all()


@pytest.mark.parametrize("name", ["grpo", "rloo", "gae", "reinforce++"])
def test_failed_rows_are_no_sample(name):
    """Scores [1, 0, failed] are treated as [1, 0] alone, whatever the failed row holds."""
    rewards = torch.tensor([[0.0, 1.0], [float("nan"), 99.0], [0.0, 0.0]])
    values = torch.tensor([[0.2, 0.1], [float("nan"), 0.0], [0.3, 0.4]])
    kept = [0, 2]

    def run(rows, **options):
        return compute_advantages_and_returns(
            rewards[rows], torch.ones(len(rows), 2), [["u", "u", "u"][i] for i in rows], name, AlgorithmConfig(),
            values=values[rows], **options,
        )  # fmt: skip

    whole = run([0, 1, 2], valid_rows=torch.tensor([True, False, True]))
    alone = run(kept)
    for with_failed, without in zip(whole, alone, strict=True):
        assert torch.equal(with_failed[kept], without)
        assert not with_failed[1].any()


def test_a_batch_of_failures_has_zero_advantages():
    advantages, returns = compute_advantages_and_returns(
        torch.ones(2, 2), torch.ones(2, 2), ["a", "a"], "grpo", AlgorithmConfig(), valid_rows=torch.tensor([False] * 2)
    )
    assert not advantages.any()
    assert not returns.any()


@st.composite
def batches(draw):
    rows = draw(st.integers(1, 12))
    width = draw(st.integers(1, 5))
    lengths = [draw(st.integers(1, width)) for _ in range(rows)]
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    scale = draw(st.sampled_from([1e-3, 1.0, 100.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rewards = torch.randn(rows, width, generator=generator, dtype=torch.float64) * scale * mask
    uids = [draw(st.sampled_from(["p0", "p1", "p2", "p10"])) for _ in range(rows)]
    valid = torch.tensor([draw(st.integers(0, 4)) > 0 for _ in range(rows)])
    return rewards, mask, uids, valid


def slow_advantage(name, row, rewards, uids, valid, norm):
    """The formula for one row."""
    if not valid[row]:
        return 0.0
    group = [sum(rewards[i].tolist()) for i in range(len(uids)) if uids[i] == uids[row] and valid[i]]
    score = sum(rewards[row].tolist())
    if name == "rloo":
        others = (sum(group) - score) / (len(group) - 1) if len(group) > 1 else score
        return score - others
    mean, std = (statistics.mean(group), statistics.stdev(group)) if len(group) > 1 else (0.0, 1.0)
    return (score - mean) / (std + 1e-6 if norm else 1.0)


@given(batches(), st.sampled_from(["grpo", "rloo"]), st.booleans())
def test_estimators_agree_with_a_loop(batch, name, norm):
    rewards, mask, uids, valid = batch
    advantages, _ = compute_advantages_and_returns(
        rewards, mask, uids, name, AlgorithmConfig(), grpo_norm_by_std=norm, valid_rows=valid
    )
    for row in range(len(uids)):
        expected = slow_advantage(name, row, rewards, uids, valid, norm)
        assert advantages[row].tolist() == pytest.approx((mask[row] * expected).tolist(), rel=1e-6, abs=1e-6)


@given(batches(), st.sampled_from(["grpo", "rloo"]), st.randoms())
def test_the_order_of_rows_does_not_matter(batch, name, random):
    rewards, mask, uids, valid = batch
    order = list(range(len(uids)))
    random.shuffle(order)

    def run(rows):
        return compute_advantages_and_returns(
            rewards[rows], mask[rows], [uids[i] for i in rows], name, AlgorithmConfig(), valid_rows=valid[rows]
        )[0]

    assert torch.allclose(run(list(range(len(uids))))[order], run(order), rtol=1e-9, atol=1e-12)
