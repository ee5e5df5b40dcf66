"""Statistics of groups."""

import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.groups import group_index, group_stats, group_sum, number_groups


def test_rows_of_one_uid_have_one_number():
    groups, num_groups = group_index(["b", "a", "b", "c"])
    assert num_groups == 3
    assert groups[0] == groups[2]
    assert sorted({*groups.tolist()}) == [0, 1, 2]


def test_failed_rows_are_a_group_of_their_own():
    groups, num_groups = group_index(["a", "a", "b", "b"], torch.tensor([True, False, True, False]))
    assert groups.tolist() == [0, 2, 1, 2]
    assert num_groups == 3


def test_sums_add_up_by_group():
    assert group_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 0, 1]), 3).tolist() == [2.0, 5.0, 0.0]


def test_statistics_of_two_groups():
    stats = group_stats(torch.tensor([1.0, 5.0, 3.0]), torch.tensor([0, 2, 0]), 3)
    assert stats.size.tolist() == [2.0, 1.0, 2.0]
    assert stats.mean.tolist() == [2.0, 5.0, 2.0]
    assert stats.centred.tolist() == [-1.0, 0.0, 1.0]
    assert stats.std.tolist() == pytest.approx([2**0.5, 0.0, 2**0.5])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-1e3, 1e3)), min_size=1, max_size=20))
def test_statistics_agree_with_a_loop(rows):
    uids, scores = zip(*rows, strict=True)
    stats = group_stats(torch.tensor(scores, dtype=torch.float64), *group_index(uids))
    for i, uid in enumerate(uids):
        group = [score for name, score in rows if name == uid]
        assert stats.size[i] == len(group)
        assert stats.mean[i].item() == pytest.approx(statistics.fmean(group), abs=1e-9)
        assert stats.centred[i].item() == pytest.approx(scores[i] - statistics.fmean(group), abs=1e-9)
        expected = statistics.stdev(group) if len(group) > 1 else 0.0
        assert stats.std[i].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "uids",
    [
        [7, 7, 8, 7],
        [("a", 1), ("a", 1), ("a", 2), ("a", 1)],
        ["1", "1", 1, "1"],
        ("x", "x", "y", "x"),
        np.array([3, 3, 5, 3]),
        np.array(["a", "a", "b", "a"], dtype=object),
        torch.tensor([0, 0, 9, 0]),
    ],
)
def test_anything_hashable_names_a_group(uids):
    groups, count = number_groups(uids)
    assert (groups.tolist(), count) == ([0, 0, 1, 0], 2)


def test_no_rows_are_no_groups():
    groups, count = number_groups([])
    assert (groups.tolist(), groups.dtype, count) == ([], torch.int64, 0)


@pytest.mark.parametrize("uids", [["a", None, None], np.array(["a", None], dtype=object)])
def test_a_row_without_a_uid_is_named(uids):
    with pytest.raises(ValueError, match="row 1 has no uid"):
        number_groups(uids)
