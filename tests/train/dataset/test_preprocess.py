"""Batch tensors from token lists; boundaries of prompts and mini-batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl.errors import ConfigError
from skyrl.train.dataset.preprocess import (
    compute_prompt_boundaries,
    compute_prompt_mini_batch_boundaries,
    convert_prompts_responses_to_batch_tensors,
)


def test_tensors_have_the_spec_values():
    sequences, attention, response_mask, rewards, loss_mask, logprobs, experts = (
        convert_prompts_responses_to_batch_tensors(
            0, [[1, 2], [3, 4, 5]], [[6, 7, 8], [9]], [[0.0, 0.0, 0.5], [1.5]], [[1, 0, 1], [1]], [[-1.0, 0, -2], [-3]]
        )
    )
    assert sequences.tolist() == [[1, 2, 6, 7, 8], [0, 3, 4, 5, 9]]
    assert attention.tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]
    assert response_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert rewards.tolist() == [[0.0, 0.0, 0.5], [0.0, 0.0, 1.5]]
    assert loss_mask.tolist() == [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]
    assert logprobs.tolist() == [[-1.0, 0.0, -2.0], [0.0, 0.0, -3.0]]
    assert experts is None
    assert [t.dtype for t in (sequences, attention, response_mask)] == [torch.int64] * 3
    assert [t.dtype for t in (rewards, loss_mask, logprobs)] == [torch.float32] * 3


def test_the_width_is_that_of_the_longest_row():
    sequences, attention, response_mask, rewards, *_ = convert_prompts_responses_to_batch_tensors(
        0, [[1, 2], [3]], [[4], [5, 6, 7]], [[2.0], [0.0, 0.0, 0.0]], [[1], [1, 1, 1]]
    )
    assert sequences.tolist() == [[0, 1, 2, 4], [3, 5, 6, 7]]
    assert attention.tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert response_mask.tolist() == [[0, 0, 1], [1, 1, 1]]
    assert rewards[0].tolist() == [0.0, 0.0, 2.0]


def test_arrays_and_tensors_are_as_good_as_lists():
    lists = convert_prompts_responses_to_batch_tensors(7, [[1, 2]], [[3, 4]], [[0.0, 1.0]], [[1, 1]], [[-1.0, -2.0]])
    arrays = convert_prompts_responses_to_batch_tensors(
        7,
        [np.array([1, 2])],
        [np.array([3, 4])],
        [torch.tensor([0.0, 1.0])],
        [np.array([1, 1])],
        [np.array([-1.0, -2])],
    )
    assert all(torch.equal(one, other) for one, other in zip(lists[:-1], arrays[:-1], strict=True))


def test_logprobs_may_be_absent():
    assert convert_prompts_responses_to_batch_tensors(0, [[1]], [[2]], [[0.0]], [[1]])[5] is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompts": [], "responses": [], "rewards": [], "loss_masks": []}, "at least one prompt"),
        ({"prompts": [[1]]}, "1 prompts but 2 responses"),
        ({"responses": [[], []], "rewards": [[], []], "loss_masks": [[], []]}, "no row of the batch has a response"),
        ({"rewards": [[0.0]]}, "rewards has 1 rows"),
        ({"rewards": [[0.0], [0.0, 0.0]]}, "rewards of row 0 has 1 values but its response has 2 tokens"),
        ({"rewards": [1.0, 0.0]}, "rewards of row 0 must be a list"),
        ({"loss_masks": [[1, 1], [1, 1]]}, "loss_masks of row 1"),
        ({"logprobs": [[-1.0, -1.0], []]}, "logprobs of row 1"),
    ],
)
def test_lengths_that_disagree_are_named(changes, text):
    good = {
        "prompts": [[1], [2]], "responses": [[3, 4], [5]], "rewards": [[0.0, 1.0], [0.0]], "loss_masks": [[1, 1], [1]]
    }  # fmt: skip
    with pytest.raises(AssertionError, match=text):
        convert_prompts_responses_to_batch_tensors(0, **(good | changes))


def test_a_row_without_response_tokens_is_all_prompt():
    sequences, _, response_mask, rewards, *_ = convert_prompts_responses_to_batch_tensors(
        0, [[1, 2], [3]], [[], [4]], [[], [1.0]], [[], [1]]
    )
    assert sequences.tolist() == [[1, 2], [3, 4]]
    assert response_mask.tolist() == [[0], [1]]
    assert rewards.tolist() == [[0.0], [1.0]]


def test_too_long_rows_only_warn(caplog):
    convert_prompts_responses_to_batch_tensors(0, [[1, 2]], [[3, 4]], [[0.0, 0.0]], [[1, 1]], max_seq_len=3)
    assert "4 tokens, more than max_seq_len=3; 1 rows" in caplog.text


def test_routes_are_refused():
    with pytest.raises(ConfigError, match="enable_return_routed_experts"):
        convert_prompts_responses_to_batch_tensors(
            0, [[1]], [[2]], [[0.0]], [[1]], rollout_expert_indices=[np.zeros((1, 1, 1))]
        )


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=8).filter(
    lambda lengths: any(r for _, r in lengths)
))  # fmt: skip
def test_every_token_lands_where_a_loop_puts_it(lengths):
    prompts = [[100 * i + t for t in range(p)] for i, (p, _) in enumerate(lengths)]
    responses = [[100 * i + 50 + t for t in range(r)] for i, (_, r) in enumerate(lengths)]
    rewards = [[float(token) for token in row] for row in responses]
    sequences, attention, response_mask, placed, *_ = convert_prompts_responses_to_batch_tensors(
        -1, prompts, responses, rewards, [[1] * len(row) for row in responses]
    )
    width, response_width = max(p + r for p, r in lengths), max(r for _, r in lengths)
    for i, (p, r) in enumerate(lengths):
        assert sequences[i].tolist() == [-1] * (width - p - r) + prompts[i] + responses[i]
        assert attention[i].tolist() == [0] * (width - p - r) + [1] * (p + r)
        assert response_mask[i].tolist() == [0] * (response_width - r) + [1] * r
        assert placed[i].tolist() == [0.0] * (response_width - r) + rewards[i]


def test_prompts_are_runs_of_equal_uids():
    assert compute_prompt_boundaries(["p0", "p0", "p1", "p1", "p1"]) == [(0, 2), (2, 5)]
    assert compute_prompt_boundaries([*"aaabbbccdddd"]) == [(0, 3), (3, 6), (6, 8), (8, 12)]


def test_a_uid_that_comes_back_is_refused():
    with pytest.raises(AssertionError, match="'a' must stand together, but it comes back at row 2"):
        compute_prompt_boundaries(["a", "b", "a"])


@pytest.mark.parametrize(
    ("uids", "expected"), [([*"aaabbbccdddd"], [(0, 6), (6, 12)]), ([*"aaaabbcccdd"], [(0, 6), (6, 11)])]
)
def test_step_wise_mini_batches_span_prompts(uids, expected):
    assert compute_prompt_mini_batch_boundaries(uids, 2, 4, True, 1) == expected


def test_mini_batches_have_equal_rows():
    assert compute_prompt_mini_batch_boundaries([*"aabbccdd"], 2, 4, False, 2) == [(0, 4), (4, 8)]
    assert compute_prompt_mini_batch_boundaries([*"aabbccdd"], 4, 4, False, 2) == [(0, 8)]


@pytest.mark.parametrize(
    ("uids", "mini", "train", "text"),
    [
        ([*"aabbccddee"], 2, 4, "holds 5 prompts but trainer.train_batch_size=4"),
        ([*"aabbcc"], 2, 3, "mini-batches of 2 prompts do not divide"),
        ([*"aabbcc"], 0, 3, "mini-batches of 0"),
        ([*"aabb"], 1, 2, None),
        ([*"aaab"], 1, 2, "at row 0 has 3 rows, not 1 prompts x 2 samples = 2"),
    ],
)
def test_counts_that_do_not_fit_are_named(uids, mini, train, text):
    if text is None:
        compute_prompt_mini_batch_boundaries(uids, mini, train, False, 2)
        return
    with pytest.raises(AssertionError, match=text):
        compute_prompt_mini_batch_boundaries(uids, mini, train, False, 2)
