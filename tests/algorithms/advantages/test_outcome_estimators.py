"""One advantage a rollout, from its group; and what holds for every estimator."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.advantages import compute_advantages_and_returns
from skyrl.config.algorithm import AlgorithmConfig
from tests.algorithms.advantages.ragged import INF, NAN, OUTCOME, RECURSIVE, Batch, batches, slow_advantages

FROM_SCORES = [name for name in OUTCOME if name not in {"remax", "gdpo"}]


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
@pytest.mark.parametrize("name", FROM_SCORES)
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


@pytest.mark.parametrize("name", FROM_SCORES)
def test_rewards_on_several_tokens_are_summed(name):
    rewards = torch.tensor([[0.25, 0.5, 0.25], [0.0, 0.0, 0.0], [0.5, 0.0, 0.5]])
    advantages, _ = compute_advantages_and_returns(rewards, torch.ones(3, 3), list("aaa"), name, AlgorithmConfig())
    assert advantages[:, 0].tolist() == pytest.approx(estimate(name, [1.0, 0.0, 1.0]))


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "liteppo"])
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


def test_maxrl_has_the_spec_values():
    assert estimate("maxrl", [1.0, 0, 0, 0]) == pytest.approx([2.999988, -0.999996, -0.999996, -0.999996], abs=1e-6)
    assert estimate("maxrl", [2.0, 0]) == pytest.approx([0.999999, -0.999999], abs=1e-6)
    assert estimate("maxrl", [0.0, 0, 0]) == [0.0, 0.0, 0.0]


def test_a_maxrl_group_of_one_keeps_its_score():
    assert estimate("maxrl", [0.75]) == [0.75]


def test_opo_has_the_spec_values():
    """Lengths 1 and 3: the baseline is (1·1 + 3·0) / 4."""
    rewards, mask = torch.tensor([[0.0, 0, 1], [0, 0, 0]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    advantages, _ = compute_advantages_and_returns(rewards, mask, ["a", "a"], "opo", AlgorithmConfig())
    assert advantages.tolist() == [[0.0, 0.0, 0.75], [-0.25, -0.25, -0.25]]


def test_opo_counts_trained_tokens():
    """Of three response tokens each, one trains in the first row and two in the second: (1·1 + 2·0) / 3."""
    rewards, mask = torch.tensor([[0.0, 0, 1], [0, 0, 0]]), torch.ones(2, 3)
    trained = torch.tensor([[0.0, 0, 1], [1, 0, 1]])
    advantages, _ = compute_advantages_and_returns(
        rewards, mask, ["a", "a"], "opo", AlgorithmConfig(), loss_mask=trained
    )
    assert advantages[:, 0].tolist() == pytest.approx([2 / 3, -1 / 3])


def test_opo_of_a_group_without_trained_tokens_takes_the_plain_mean():
    assert estimate("opo", [1.0, 0.0], loss_mask=torch.zeros(2, 3)) == [0.5, -0.5]


def test_gpg_has_the_spec_values():
    assert estimate("gpg", [1.0, 0, 1, 1], list("aabb")) == [1.0, -1.0, 0.0, 0.0]


def test_gpg_without_any_spread_is_zero():
    assert estimate("gpg", [1.0, 1, 0, 0, 3], list("aabbc")) == [0.0] * 5


def test_liteppo_has_the_spec_values():
    expected = [0.999998, -0.999998, 0.0, 0.0]
    assert estimate("liteppo", [1.0, 0, 1, 1], list("aabb")) == pytest.approx(expected, abs=1e-6)


def test_no_op_gives_the_rewards_of_response_tokens():
    rewards = torch.tensor([[NAN, 0.5, -1.0], [INF, NAN, 0.25], [1.0, 2.0, 3.0]])
    mask, valid = torch.tensor([[0, 1, 1], [0, 0, 1], [1, 1, 1]]), torch.tensor([True, True, False])
    advantages, returns = compute_advantages_and_returns(
        rewards, mask, list("abc"), "no_op", AlgorithmConfig(), valid_rows=valid
    )
    assert advantages.tolist() == returns.tolist() == [[0.0, 0.5, -1.0], [0.0, 0.0, 0.25], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("name", [*OUTCOME, *RECURSIVE])
def test_a_batch_where_nothing_trains_is_finite(name):
    """Three rows: no response at all, a failed one, and one whose loss mask is empty."""
    batch = Batch(
        rewards=torch.tensor([[NAN, NAN], [NAN, 1.0], [0.0, 1.0]], dtype=torch.float64),
        response_mask=torch.tensor([[0, 0], [1, 1], [0, 1]]),
        loss_mask=torch.zeros(3, 2),
        values=torch.tensor([[NAN, INF], [NAN, 0.0], [INF, 0.5]], dtype=torch.float64),
        uids=["a", "a", "b"],
        valid=torch.tensor([True, False, True]),
        baseline=torch.tensor([NAN, INF, 0.5]),
        style=torch.tensor([0.0, NAN, 1.0]),
        grade=torch.tensor([0.0, INF, 1.0]),
    )
    for result in batch.estimate(name):
        assert result.isfinite().all()
        assert not result[:2].any()


@settings(max_examples=50, deadline=None)
@given(batches(), st.booleans(), st.integers(1, 4))
def test_estimators_agree_with_a_loop(batch, norm, k):
    config = AlgorithmConfig(pass_at_k=k, reward_weights={"style": 0.5})
    for name in OUTCOME:
        advantages, returns = batch.estimate(name, config, grpo_norm_by_std=norm)
        rows = slow_advantages(name, batch, norm=norm, k=k, weights=(0.5, 1.0))
        expected = batch.response_mask * torch.tensor(rows, dtype=torch.float64).unsqueeze(1)
        assert torch.allclose(advantages, expected, rtol=1e-5, atol=1e-6), name
        assert torch.equal(advantages, returns)


@settings(max_examples=25, deadline=None)
@given(batches(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(batch, random):
    order = list(range(len(batch.uids)))
    random.shuffle(order)
    for name in (*OUTCOME, *RECURSIVE):
        for result, shuffled in zip(batch.estimate(name), batch.take(order).estimate(name), strict=True):
            assert torch.allclose(result[order], shuffled, rtol=1e-6, atol=1e-7), name


@settings(max_examples=25, deadline=None)
@given(batches(), st.integers(1, 3))
def test_masked_nan_and_more_padding_on_the_left_change_nothing(batch, extra):
    rows = len(batch.uids)

    def pad(tensor, filler):
        return torch.cat([tensor.new_full((rows, extra), filler), tensor], dim=1)

    def spoil(tensor, filler):
        hidden = (batch.response_mask == 0) | ~batch.valid.unsqueeze(1)
        return pad(torch.where(hidden, filler, tensor), filler)

    spoiled = replace(
        batch,
        rewards=spoil(batch.rewards, NAN),
        values=spoil(batch.values, INF),
        response_mask=pad(batch.response_mask, 0),
        loss_mask=pad(batch.loss_mask, 0.0),
        style=torch.where(batch.valid, batch.style, NAN),
        baseline=torch.where(batch.valid, batch.baseline, INF),
    )
    for name in (*OUTCOME, *RECURSIVE):
        for result, padded in zip(batch.estimate(name), spoiled.estimate(name), strict=True):
            assert not padded[:, :extra].any(), name
            assert torch.allclose(padded[:, extra:], result, rtol=1e-9, atol=1e-12), name


@settings(max_examples=25, deadline=None)
@given(batches())
def test_failed_rows_might_as_well_not_be_there(batch):
    kept = batch.valid.nonzero().squeeze(1).tolist()
    for name in (*OUTCOME, *RECURSIVE):
        whole = batch.estimate(name)
        for result, alone in zip(whole, batch.take(kept).estimate(name), strict=True):
            assert torch.allclose(result[kept], alone, rtol=1e-6, atol=1e-7), name
            assert not result[~batch.valid].any(), name
