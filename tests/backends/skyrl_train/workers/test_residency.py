from __future__ import annotations

from skyrl.backends.skyrl_train.workers.residency import Move, Parts, ResidencyTable

BOTH, MODEL, OPTIMIZER = Parts(True, True), Parts(model=True), Parts(optimizer=True)


def test_a_role_evicts_the_others_of_its_group_and_loads_what_is_missing() -> None:
    table = ResidencyTable({"policy": "all", "ref": "all"})
    assert table.ensure("ref", model=True, optimizer=False) == [Move("ref", True, MODEL)]
    assert table.ensure("policy", model=True, optimizer=True) == [Move("ref", False, MODEL), Move("policy", True, BOTH)]
    assert table.ensure("policy", model=True, optimizer=False) == []
    assert table.resident("ref") == Parts()


def test_only_missing_parts_move() -> None:
    table = ResidencyTable({"policy": "all"})
    table.mark("policy", MODEL)
    assert table.ensure("policy", model=True, optimizer=True) == [Move("policy", True, OPTIMIZER)]


def test_roles_of_other_groups_stay() -> None:
    table = ResidencyTable({"policy": "a", "ref": "a", "teacher": "b"})
    table.mark("teacher", MODEL)
    assert table.ensure("policy", model=True, optimizer=False) == [Move("policy", True, MODEL)]
    assert table.resident("teacher") == MODEL


def test_a_role_that_shares_nothing_never_moves() -> None:
    table = ResidencyTable({})
    assert table.ensure("policy", model=True, optimizer=True) == []
    assert table.release("policy", model=True, optimizer=True) == []


def test_before_a_sync_the_optimizer_leaves_and_after_it_the_model() -> None:
    table = ResidencyTable({"policy": "all"})
    table.mark("policy", BOTH)
    assert table.release("policy", model=False, optimizer=True) == [Move("policy", False, OPTIMIZER)]
    assert table.release("policy", model=True, optimizer=True) == [Move("policy", False, MODEL)]
    assert table.release("policy", model=True, optimizer=True) == []
