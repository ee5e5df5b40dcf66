"""Which groups teach something, against a loop over groups."""

from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl.algorithms.group_filters import (
    GroupSpread,
    group_spread,
    replace_flat,
    rows_of_groups,
    select_good,
    zero_variance_filter,
    zero_variance_rows,
)

INF, NAN = float("inf"), float("nan")


def spread_of(scores, uids, live=None):
    live = [True] * len(uids) if live is None else live
    return group_spread(torch.tensor(scores, dtype=torch.float64), torch.tensor(live, dtype=torch.bool), uids)


def masked(scores, uids, live=None, tol=1e-6):
    live = [True] * len(uids) if live is None else live
    rows, count = zero_variance_rows(torch.tensor(scores, dtype=torch.float64), torch.tensor(live), uids, tol)
    return rows.tolist(), count


# -- the zero-variance filter


def test_equal_scores_are_dropped_and_others_stay():
    assert masked([1, 1, 0, 1], ["a", "a", "b", "b"]) == ([True, True, False, False], 1)


@pytest.mark.parametrize(("tol", "dropped"), [(1e-6, 1), (0.0, 0)])
def test_a_spread_up_to_the_tolerance_counts_as_none(tol, dropped):
    assert masked([0.5, 0.5000004], ["a", "a"], tol=tol)[1] == dropped


def test_only_live_rows_are_compared_and_all_rows_of_the_group_are_masked():
    assert masked([1.0, 1.0, 0.0], ["a"] * 3, [True, True, False]) == ([True] * 3, 1)


def test_a_group_with_one_live_row_or_none_is_kept():
    assert masked([1.0, 1.0, 0.0, 0.0], ["a", "a", "b", "b"], [True, False, False, False]) == ([False] * 4, 0)


@pytest.mark.parametrize(("name", "live", "uids"), [("live", 2, "aab"), ("uids", 3, "aa")])
def test_a_wrong_number_of_rows_is_named(name, live, uids):
    with pytest.raises(ValueError, match=rf"{name} has shape \(2,\) but scores has shape \(3,\)"):
        zero_variance_rows(torch.zeros(3), torch.ones(live, dtype=torch.bool), list(uids))


def test_a_uid_may_be_anything_hashable():
    assert masked([1, 1, 0, 1], [("a", 1), ("a", 1), 5, 5]) == ([True, True, False, False], 1)
    with pytest.raises(ValueError, match="row 2 has no uid"):
        masked([1, 1, 0], ["a", "a", None])


def test_what_a_dead_row_holds_never_matters():
    assert masked([1.0, NAN, 0.0, 1.0, 1.0, INF], list("aaabbb"), [True, False, True, True, True, False]) == (
        [False] * 3 + [True] * 3,
        1,
    )


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_live_score_that_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match=r"row 1 \(uid 'b'\) is -?(nan|inf), not a finite number"):
        masked([0.0, value], ["a", "b"])


def test_upstreams_form_returns_the_rows_that_are_kept():
    assert zero_variance_filter([1.0, 1.0, 0.0, 1.0, 0.5], ["a", "a", "b", "b", "c"]) == [2, 3, 4]


@st.composite
def batches(draw):
    uids = draw(st.lists(st.sampled_from("zyxab"), min_size=1, max_size=24))
    scores = draw(st.lists(st.sampled_from([0.0, 1.0, 1.0 + 4e-7, -2.0]), min_size=len(uids), max_size=len(uids)))
    live = draw(st.lists(st.booleans(), min_size=len(uids), max_size=len(uids)))
    return uids, scores, live, draw(st.sampled_from([0.0, 1e-6]))


def slowly(uids, scores, live, tol):
    """Groups in the order of their first rows, each with its rows and whether it is flat and good."""
    rows = defaultdict(list)
    for row, uid in enumerate(uids):
        rows[uid].append(row)
    judged = []
    for uid, members in rows.items():
        values = [scores[row] for row in members if live[row]]
        flat = len(values) > 1 and max(values) - min(values) <= tol
        judged.append((uid, members, flat, bool(values) and not flat))
    return judged


@given(batches())
def test_flat_and_good_groups_are_those_of_a_loop(batch):
    uids, scores, live, tol = batch
    expected = slowly(*batch)
    groups = spread_of(scores, uids, live)
    assert groups.is_flat(tol).tolist() == [flat for _, _, flat, _ in expected]
    assert groups.is_good(tol).tolist() == [good for _, _, _, good in expected]
    flat_rows = {row for _, members, flat, _ in expected if flat for row in members}
    count = sum(flat for _, _, flat, _ in expected)
    assert masked(scores, uids, live, tol) == ([row in flat_rows for row in range(len(uids))], count)


@given(batches(), st.randoms())
def test_the_order_of_rows_does_not_change_what_is_dropped(batch, random):
    uids, scores, live, tol = batch
    rows, count = masked(scores, uids, live, tol)
    order = random.sample(range(len(uids)), len(uids))
    shuffled = [[column[row] for row in order] for column in (scores, uids, live)]
    assert masked(*shuffled, tol) == ([rows[row] for row in order], count)


@given(batches(), batches())
def test_batches_put_together_keep_their_groups_apart(first, second):
    parts = [spread_of(scores, uids, live) for uids, scores, live, _ in (first, second)]
    joined = GroupSpread.join(parts)
    uids = [f"first {uid}" for uid in first[0]] + [f"second {uid}" for uid in second[0]]
    whole = spread_of(first[1] + second[1], uids, first[2] + second[2])
    assert torch.equal(joined.index, whole.index)
    assert torch.equal(joined.spread, whole.spread)
    assert torch.equal(joined.num_live, whole.num_live)


# -- dynamic sampling: filter


def test_the_first_good_groups_fill_the_batch():
    """Groups A, B, C, D, then E, F, G, H of two rollouts; four groups are needed."""
    uids = [name for name in "ABCDEFGH" for _ in range(2)]
    scores = [1, 0, 0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 1, 0, 1, 1]
    first = spread_of(scores[:8], uids[:8])
    assert first.is_good(1e-6).tolist() == [True, False, False, True]
    chosen = select_good(spread_of(scores, uids), uids, tol=1e-6, limit=4)
    assert chosen.uids == ["A", "A", "D", "D", "E", "E", "F", "F"]
    assert chosen.rows == [0, 1, 6, 7, 8, 9, 10, 11]


def test_groups_of_one_are_good_unless_they_failed():
    assert spread_of([0.0, 0.0], ["a", "b"], [True, False]).is_good(1e-6).tolist() == [True, False]


def test_a_group_is_judged_on_the_rollouts_that_did_not_fail():
    uids, live = list("aaabbb"), [True, True, False, True, True, False]
    assert spread_of([1, 1, 0, 1, 0, 0], uids, live).is_good(1e-6).tolist() == [False, True]


@given(batches(), st.integers(0, 6))
def test_selected_rows_are_those_of_a_loop(batch, limit):
    uids, scores, live, tol = batch
    good = [(uid, members) for uid, members, _, is_good in slowly(*batch) if is_good][:limit]
    chosen = select_good(spread_of(scores, uids, live), uids, tol=tol, limit=limit)
    assert chosen.rows == [row for _, members in good for row in members]
    assert chosen.uids == [uid for uid, members in good for _ in members]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.lists(st.integers(0, 99), max_size=8))
def test_rows_of_chosen_groups_follow_each_other(names, picks):
    index = spread_of([0.0] * len(names), [str(name) for name in names]).index
    chosen = [pick % (int(index.max()) + 1) for pick in picks]
    expected = [row for group in chosen for row in range(len(names)) if int(index[row]) == group]
    assert rows_of_groups(index, torch.tensor(chosen, dtype=torch.long)).tolist() == expected


# -- dynamic sampling: replace

PAIRS = [uid for uid in "abcd" for _ in range(2)]


def replaced(scores, uids=PAIRS, ratio=0.3, seed=0):
    return replace_flat(spread_of(scores, uids), uids, tol=1e-6, min_ratio=ratio, seed=seed)


def test_one_good_group_of_four_is_too_few():
    assert replaced([1, 0, 1, 1, 0, 0, 1, 1]) is None
    assert replaced([0] * 8, ratio=0.0) is None


def test_two_good_groups_take_the_places_of_the_others_under_names_of_their_own():
    chosen = replaced([1, 1, 1, 0, 0, 0, 0, 1])
    assert sorted([chosen.uids[0], chosen.uids[4]]) == ["b#dup1", "d#dup1"]
    assert chosen.uids[2:4] == ["b", "b"]
    assert chosen.uids[6:] == ["d", "d"]
    copied = {"b#dup1": [2, 3], "d#dup1": [6, 7]}
    assert chosen.rows == [*copied[chosen.uids[0]], 2, 3, *copied[chosen.uids[4]], 6, 7]


def test_few_good_groups_are_copied_several_times():
    uids = [uid for uid in "abcde" for _ in range(2)]
    chosen = replaced([0, 0, 0, 1, 0, 0, 0, 0, 0, 0], uids, ratio=0.0)
    assert chosen.uids[::2] == ["b#dup1", "b", "b#dup2", "b#dup3", "b#dup4"]
    assert chosen.rows == [2, 3] * 5


def test_a_full_batch_stays_as_it_is():
    chosen = replaced([0, 1] * 4)
    assert (chosen.rows, chosen.uids) == (list(range(8)), PAIRS)


def test_the_seed_decides_the_draw():
    uids = [str(number) for number in range(40) for _ in range(2)]
    scores = [0, 1] * 20 + [0, 0] * 20
    assert replaced(scores, uids, seed=1) == replaced(scores, uids, seed=1) != replaced(scores, uids, seed=2)


@given(batches(), st.sampled_from([0.0, 0.3, 0.5]), st.integers(0, 5))
def test_every_place_holds_a_good_group_and_every_group_its_own_name(batch, ratio, seed):
    uids, scores, live, tol = batch
    expected = slowly(*batch)
    good = {uid: members for uid, members, _, is_good in expected if is_good}
    chosen = replace_flat(spread_of(scores, uids, live), uids, tol=tol, min_ratio=ratio, seed=seed)
    if not good or len(good) <= ratio * len(expected):
        assert chosen is None
        return
    names = list(dict.fromkeys(chosen.uids))
    assert len(names) == len(expected)
    sources = [name.partition("#")[0] for name in names]
    for name, source, (uid, _, _, is_good) in zip(names, sources, expected, strict=True):
        assert [row for row, of in zip(chosen.rows, chosen.uids, strict=True) if of == name] == good[source]
        assert (name == uid) == is_good
    if 2 * len(good) >= len(expected):  # drawn without replacement
        assert all(sources.count(uid) <= 2 for uid in good)
