from itertools import islice

from skyrl.train.dataset.shuffle import EpochShuffle


def test_each_pass_is_a_permutation_of_its_own_epoch():
    sampler = EpochShuffle(20, seed=3)
    first, second = list(sampler), list(sampler)
    assert sorted(first) == sorted(second) == list(range(20)) and first != second
    assert (first, second) == (sampler.order(0), sampler.order(1))
    assert EpochShuffle(20, seed=4).order(0) != first


def test_a_pass_that_is_never_used_costs_no_epoch():
    sampler = EpochShuffle(5, seed=3)
    iter(sampler)
    assert list(sampler) == sampler.order(0)


def test_a_pass_goes_on_where_its_state_was_taken():
    sampler = EpochShuffle(6, seed=3)
    list(sampler)
    passed = iter(sampler)
    list(islice(passed, 2))
    other = EpochShuffle(6, seed=3)
    resumed = iter(other)
    resumed.load_state_dict(passed.state_dict())
    assert list(resumed) == sampler.order(1)[2:]
    assert list(other) == sampler.order(2)


def test_the_state_before_the_first_index_is_that_of_the_next_epoch():
    sampler = EpochShuffle(6, seed=3)
    list(sampler)
    assert iter(sampler).state_dict() == {"epoch": 1, "position": 0}
