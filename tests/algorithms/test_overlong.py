"""Soft overlong punishment on numbers."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl.algorithms.overlong import overlong_penalty, punish_overlong
from skyrl.errors import ConfigError


def test_the_penalty_grows_through_the_buffer_and_nothing_is_left_beyond_the_limit():
    lengths = [0, 800, 801, 900, 1000, 1001]
    expected = [1.0, 1.0, 0.995, 0.5, 0.0, 0.0]
    assert punish_overlong([1.0] * 6, lengths, max_len=1000, buffer_len=200) == pytest.approx(expected)
    penalty, beyond = overlong_penalty(torch.tensor(lengths), max_len=1000, buffer_len=200)
    assert penalty.tolist() == pytest.approx([0.0, 0.0, 0.005, 0.5, 1.0, 0.0])
    assert beyond.tolist() == [False] * 5 + [True]


def test_a_response_beyond_the_limit_loses_a_negative_reward_too():
    assert punish_overlong([-3.0], [11], max_len=10, buffer_len=5) == [0.0]


def test_the_last_token_pays_and_the_lists_that_came_in_stay():
    rewards = [[0.25, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.5]]
    before = copy.deepcopy(rewards)
    punished = punish_overlong(rewards, [3, 4, 1], max_len=3, buffer_len=2, factor=0.5)
    assert punished == [[0.25, 0.0, 0.5], [0.0] * 4, [0.5]]
    assert rewards == before


def test_a_response_without_tokens_has_no_token_to_pay():
    assert punish_overlong([[]], [0], max_len=2, buffer_len=4) == [[]]


@pytest.mark.parametrize("buffer_len", [0, -1])
def test_a_buffer_without_tokens_is_refused(buffer_len):
    with pytest.raises(ConfigError, match=f"overlong_buffer_len={buffer_len} must be at least 1"):
        punish_overlong([1.0], [1], max_len=10, buffer_len=buffer_len)


def test_rewards_and_lengths_must_agree():
    with pytest.raises(ValueError, match=r"rewards has shape \(2,\) but lengths has shape \(1,\)"):
        punish_overlong([1.0, 2.0], [1], max_len=10, buffer_len=5)


@given(
    st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 40)), min_size=1, max_size=20),
    st.integers(1, 30),
    st.floats(0, 3),
)
def test_rewards_equal_a_loop_over_rows_in_both_forms(rows, buffer_len, factor):
    rewards, lengths = [reward for reward, _ in rows], [length for _, length in rows]
    expected = []
    for reward, length in rows:
        if length > 30:
            expected.append(0.0)
        elif length > 30 - buffer_len:
            expected.append(reward - (length - (30 - buffer_len)) / buffer_len * factor)
        else:
            expected.append(reward)
    options = {"max_len": 30, "buffer_len": buffer_len, "factor": factor}
    assert punish_overlong(rewards, lengths, **options) == expected
    tokens = [[0.0] * (length - 1) + [reward] * (length > 0) for reward, length in rows]
    sums = [sum(row) for row in punish_overlong(tokens, lengths, **options)]
    assert sums == [value if length else 0.0 for value, length in zip(expected, lengths, strict=True)]
