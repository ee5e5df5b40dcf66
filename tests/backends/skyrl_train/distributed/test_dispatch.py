from __future__ import annotations

from typing import Any

import pytest
import torch

from skyrl.backends.skyrl_train.distributed import dispatch as module
from skyrl.backends.skyrl_train.distributed.dispatch import (
    ActorInfo,
    DispatchRegistry,
    MeshDispatch,
    MeshRank,
    PassThroughDispatch,
    WorkerOutput,
    loss_fn_outputs_to_tensor,
    register_dispatch_type,
    stage_chunks,
)
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch


class FakeMethod:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def remote(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs))
        return f"ref{len(self.calls)}"


class FakeActor:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.work = FakeMethod(self.calls)


def mesh(dp: int, sp: int = 1) -> list[ActorInfo]:
    return [
        ActorInfo(FakeActor(), MeshRank(dp=d, sp=s, world_size=dp * sp, dp_size=dp))
        for d in range(dp)
        for s in range(sp)
    ]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """An object store that hands the object itself out as its ref."""
    puts: list[Any] = []

    def put(value: Any) -> Any:
        puts.append(value)
        return value

    monkeypatch.setattr(module.ray, "put", put)
    return puts


def batch(rows: int) -> TrainingInputBatch:
    return TrainingInputBatch(
        {"sequences": torch.arange(rows).unsqueeze(1), "loss_mask": torch.ones(rows, 1)},
        metadata={"response_length": 1},
    )


def test_every_rank_of_a_data_parallel_index_gets_its_chunk_and_each_is_stored_once(store: list[Any]) -> None:
    actors = mesh(dp=4, sp=2)
    MeshDispatch.dispatch(actors, "work", batch(8), flag=1)
    assert len(store) == 4
    for info in actors:
        (args, kwargs), *more = info.handle.calls
        assert not more
        assert args[0]["sequences"].flatten().tolist() == [2 * info.rank.dp, 2 * info.rank.dp + 1]
        assert kwargs == {"flag": 1}


def test_outputs_are_those_of_sp_zero_in_data_parallel_order() -> None:
    actors = list(reversed(mesh(dp=2, sp=2)))
    outputs = [
        WorkerOutput(
            metrics={"loss": float(info.rank.dp)},
            tensors={"logprobs": torch.full((1, 2), float(10 * info.rank.dp + info.rank.sp))},
        )
        for info in actors
    ]
    joined = MeshDispatch.collect(actors, outputs)
    assert joined.tensors["logprobs"].tolist() == [[0.0, 0.0], [10.0, 10.0]]
    assert joined.metrics == {"loss": 0.0}


def test_rows_that_do_not_divide_are_refused(store: list[Any]) -> None:
    with pytest.raises(ValueError, match="7 rows does not divide over 2"):
        MeshDispatch.dispatch(mesh(2), "work", batch(7))


def test_only_a_batch_can_be_split(store: list[Any]) -> None:
    with pytest.raises(ValueError, match="TrainingInputBatch"):
        MeshDispatch.dispatch(mesh(2), "work", [1, 2])
    MeshDispatch.dispatch(mesh(2), "work", data=batch(2))


def test_staged_mini_batches_hold_their_rows_padded_to_the_ranks(store: list[Any]) -> None:
    staged = stage_chunks(2, batch(5), [(0, 2), (2, 5)])
    rows = [[chunk["sequences"].flatten().tolist() for chunk in chunks] for chunks in staged]
    assert rows == [[[0], [1]], [[2, 3], [4, 2]]]  # a copy of the first row pads
    assert staged[1][1]["loss_mask"].flatten().tolist() == [1.0, 0.0]


def test_pass_through_repeats_the_arguments() -> None:
    actors = mesh(2)
    assert PassThroughDispatch.dispatch(actors, "work", 1, two=2) == ["ref1", "ref1"]
    assert [info.handle.calls for info in actors] == [[((1,), {"two": 2})]] * 2


def test_a_dispatch_type_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DispatchRegistry, "_types", dict(DispatchRegistry._types))
    register_dispatch_type("again", PassThroughDispatch)
    assert DispatchRegistry.get("again") is PassThroughDispatch
    assert DispatchRegistry.list_registered() == ["mesh", "pass_through", "again"]
    with pytest.raises(KeyError, match="nothing"):
        DispatchRegistry.get("nothing")


def test_rows_of_floats_are_made_from_tensors_when_asked_for() -> None:
    output = WorkerOutput(tensors={"logprobs": torch.tensor([[0.0, 1.0], [2.0, 3.0]])}, lengths=torch.tensor([1, 2]))
    assert output.loss_fn_outputs == [{"logprobs": [1.0]}, {"logprobs": [2.0, 3.0]}]
    stacked = loss_fn_outputs_to_tensor(output.loss_fn_outputs, pad_value=-1.0)
    assert stacked.tolist() == [[1.0, -1.0], [2.0, 3.0]]


def test_no_rows_cannot_be_stacked() -> None:
    with pytest.raises(ValueError, match="logprobs"):
        loss_fn_outputs_to_tensor([])
    assert WorkerOutput().loss_fn_outputs == []


def test_outputs_given_as_rows_are_joined() -> None:
    outputs = [WorkerOutput("scalar", [{"logprobs": [float(dp)]}], {"loss": 1.0}) for dp in range(2)]
    assert WorkerOutput.cat(mesh(2), outputs).loss_fn_outputs == [{"logprobs": [0.0]}, {"logprobs": [1.0]}]
