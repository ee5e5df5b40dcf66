"""How one call reaches the ranks of a group, and how their answers become one.

``mesh`` splits a batch over the data-parallel axis; ``pass_through`` repeats the arguments everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import Tensor

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch, pad_training_input_batch

Boundaries = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class MeshRank:
    """Where one rank stands. Example: ``MeshRank(dp=1, world_size=2, dp_size=2)`` is the second of two."""

    dp: int = 0
    """Data-parallel index: which chunk of a batch this rank gets."""
    sp: int = 0
    """Sequence-parallel index."""
    tp: int = 0
    """Tensor-parallel index."""
    pp: int = 0
    """Pipeline stage."""
    world_size: int = 1
    """Ranks in the group."""
    dp_size: int = 1
    """Length of the data-parallel axis."""
    pp_size: int = 1
    """Pipeline stages."""

    def is_collection_dp_rank(self) -> bool:
        """Whether this rank's answer stands for its data-parallel index."""
        return self.sp == 0 and self.tp == 0 and self.pp == self.pp_size - 1


@dataclass(frozen=True)
class ActorInfo:
    """An actor and its place in the mesh."""

    handle: Any
    """Ray's actor handle."""
    rank: MeshRank
    """Where it stands."""


class WorkerOutput:
    """What a worker call returns: metrics, and per-token results as tensors [rows, response], right-aligned.

    Upstream's ``loss_fn_outputs`` (one dict of float lists per row) is made from the tensors when it is read:
    the lists never travel. ``lengths`` cut a row to its last values; None keeps whole rows.
    """

    def __init__(
        self,
        loss_fn_output_type: str = "scalar",
        loss_fn_outputs: list[dict[str, Any]] | None = None,
        metrics: dict[str, float] | None = None,
        *,
        tensors: dict[str, Tensor] | None = None,
        lengths: Tensor | None = None,
    ) -> None:
        self.loss_fn_output_type = loss_fn_output_type
        self.metrics = metrics or {}
        self.tensors = tensors or {}
        self.lengths = lengths
        self._rows = loss_fn_outputs

    @property
    def loss_fn_outputs(self) -> list[dict[str, Any]]:
        """One dict per row, name to list of floats."""
        if self._rows is None:
            self._rows = self._make_rows()
        return self._rows

    def _make_rows(self) -> list[dict[str, Any]]:
        if not self.tensors:
            return []
        rows = len(next(iter(self.tensors.values())))
        lengths = [None] * rows if self.lengths is None else self.lengths.tolist()
        return [
            {name: _tail(tensor[row], lengths[row]) for name, tensor in self.tensors.items()} for row in range(rows)
        ]

    @classmethod
    def cat(cls, actor_infos: Sequence[ActorInfo], outputs: Sequence[WorkerOutput]) -> WorkerOutput:
        """Join the answers of all ranks: rows of the collection ranks in data-parallel order, metrics of the first."""
        chosen = collect_by_dp(actor_infos, outputs)
        first = chosen[0]
        if not first.tensors:
            rows = [row for output in chosen for row in output.loss_fn_outputs]
            return cls(first.loss_fn_output_type, rows, first.metrics)
        tensors = {name: torch.cat([output.tensors[name] for output in chosen]) for name in first.tensors}
        lengths = None
        if first.lengths is not None:
            lengths = torch.cat([output.lengths for output in chosen if output.lengths is not None])
        return cls(first.loss_fn_output_type, None, first.metrics, tensors=tensors, lengths=lengths)


def _tail(row: Tensor, length: int | None) -> list[float]:
    return row.tolist() if length is None else row[len(row) - length :].tolist()


def collect_by_dp(actor_infos: Sequence[ActorInfo], results: Sequence[Any]) -> list[Any]:
    """Results of the collection ranks, by data-parallel index."""
    by_dp = {
        info.rank.dp: result
        for info, result in zip(actor_infos, results, strict=True)
        if info.rank.is_collection_dp_rank()
    }
    return [by_dp[dp] for dp in sorted(by_dp)]


def loss_fn_outputs_to_tensor(
    loss_fn_outputs: Sequence[Mapping[str, Sequence[float]]], key: str = "logprobs", pad_value: float = 0.0
) -> Tensor:
    """Stack rows of different lengths into float32 [rows, longest], padded on the right.

    Raises:
        ValueError: There are no rows.
    """
    if not loss_fn_outputs:
        raise ValueError(f"no rows to take {key!r} from: loss_fn_outputs is empty")
    rows = [torch.tensor(list(row[key]), dtype=torch.float32) for row in loss_fn_outputs]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_value)


def split_batch(data: TrainingInputBatch, dp_size: int) -> list[TrainingInputBatch]:
    """Cut a batch into ``dp_size`` equal runs of rows.

    Raises:
        ValueError: The rows do not divide.
    """
    if len(data) % dp_size:
        raise ValueError(
            f"a batch of {len(data)} rows does not divide over {dp_size} data-parallel ranks; pad it first"
        )
    return data.chunk(len(data) // dp_size)


def stage_chunks(dp_size: int, data: TrainingInputBatch, boundaries: Boundaries) -> list[list[Any]]:
    """Put every mini-batch into the object store, once per data-parallel rank.

    Each range of rows is padded to a multiple of ``dp_size``.

    Returns:
        ``refs[mini_batch][dp]``.
    """
    staged = []
    for start, end in boundaries:
        rows = data[start:end]
        rows = pad_training_input_batch(rows, -len(rows) % dp_size)
        staged.append([ray.put(chunk) for chunk in split_batch(rows, dp_size)])
    return staged


class Dispatch(ABC):
    """A way to send one call to all ranks."""

    @staticmethod
    @abstractmethod
    def dispatch(actor_infos: Sequence[ActorInfo], method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Start ``method`` on every rank; one ref per rank, in order."""

    @staticmethod
    @abstractmethod
    def collect(actor_infos: Sequence[ActorInfo], results: Sequence[Any]) -> Any:
        """Join the ranks' results."""


class MeshDispatch(Dispatch):
    """Rank i works on the rows of its data-parallel index."""

    @staticmethod
    def validate_dispatch_args(*args: Any, **kwargs: Any) -> tuple[TrainingInputBatch, dict[str, Any]]:
        """Take the batch out of the arguments: the only positional one, or ``data=``.

        Raises:
            ValueError: There is no `TrainingInputBatch`, or more than one positional argument.
        """
        data = args[0] if args else kwargs.pop("data", None)
        if len(args) > 1 or not isinstance(data, TrainingInputBatch):
            raise ValueError(f"mesh dispatch takes one TrainingInputBatch, got {[type(a).__name__ for a in args]}")
        return data, kwargs

    @staticmethod
    def dispatch(actor_infos: Sequence[ActorInfo], method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Split the batch; every chunk is put into the object store once."""
        data, kwargs = MeshDispatch.validate_dispatch_args(*args, **kwargs)
        refs = [ray.put(chunk) for chunk in split_batch(data, actor_infos[0].rank.dp_size)]
        return dispatch_from_staged(actor_infos, method, refs, **kwargs)

    @staticmethod
    def collect(actor_infos: Sequence[ActorInfo], results: Sequence[Any]) -> Any:
        """Join `WorkerOutput`s; other results become a list by data-parallel index."""
        if results and isinstance(results[0], WorkerOutput):
            return WorkerOutput.cat(actor_infos, results)
        return collect_by_dp(actor_infos, results)


class PassThroughDispatch(Dispatch):
    """Every rank gets the same arguments."""

    @staticmethod
    def dispatch(actor_infos: Sequence[ActorInfo], method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Start the call everywhere."""
        return [getattr(info.handle, method).remote(*args, **kwargs) for info in actor_infos]

    @staticmethod
    def collect(actor_infos: Sequence[ActorInfo], results: Sequence[Any]) -> list[Any]:
        """Results by rank."""
        return list(results)


def dispatch_from_staged(
    actor_infos: Sequence[ActorInfo], method: str, chunk_refs: Sequence[Any], **kwargs: Any
) -> list[Any]:
    """Start ``method`` on every rank with the staged chunk of its data-parallel index."""
    return [getattr(info.handle, method).remote(chunk_refs[info.rank.dp], **kwargs) for info in actor_infos]


class DispatchRegistry:
    """Dispatch types by name."""

    _types: dict[str, type[Dispatch]] = {"mesh": MeshDispatch, "pass_through": PassThroughDispatch}  # noqa: RUF012

    @classmethod
    def register(cls, name: str, dispatch_class: type[Dispatch]) -> None:
        """Make a dispatch type known.

        Raises:
            ValueError: It is no subclass of `Dispatch`.
        """
        if not issubclass(dispatch_class, Dispatch):
            raise ValueError(f"{dispatch_class.__name__} must derive from Dispatch")
        cls._types[name] = dispatch_class

    @classmethod
    def get(cls, name: str) -> type[Dispatch]:
        """Look a type up; KeyError names those that exist."""
        if name not in cls._types:
            raise KeyError(f"dispatch type {name!r} is not registered; there are {cls.list_registered()}")
        return cls._types[name]

    @classmethod
    def list_registered(cls) -> list[str]:
        """All names."""
        return list(cls._types)


def register_dispatch_type(name: str, dispatch_class: type[Dispatch]) -> None:
    """Make a dispatch type known under a name."""
    DispatchRegistry.register(name, dispatch_class)
