import pytest

from skyrl.train.generators.masks import apply_overlong_filtering, zero_rewards_on_non_stop


def test_rows_that_did_not_end_by_themselves_lose_their_mask():
    masks = [[1, 1], [1], [1, 0], [1]]
    filtered = apply_overlong_filtering(masks, ["stop", "length", "complete", "error"])
    assert filtered == [[1, 1], [0], [1, 0], [0]]
    assert masks == [[1, 1], [1], [1, 0], [1]] and filtered[0] is not masks[0]


def test_rewards_are_zeroed_in_their_own_form():
    assert zero_rewards_on_non_stop([1.0, 2.0], ["length", "stop"]) == [0.0, 2.0]
    assert zero_rewards_on_non_stop([[0, 1.0], [2.0]], ["length", "eos"]) == [[0.0, 0.0], [2.0]]


def test_different_lengths_are_refused():
    with pytest.raises(AssertionError):
        apply_overlong_filtering([[1]], [])
    with pytest.raises(AssertionError):
        zero_rewards_on_non_stop([1.0], [])
