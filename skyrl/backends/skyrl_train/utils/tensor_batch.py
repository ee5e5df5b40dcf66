"""Named columns of equal length, cut and joined by rows, pickled without copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from skyrl.backends.skyrl_train.utils import batch_file
from skyrl.backends.skyrl_train.utils.tensor_pickle import PackedTensor, pack_tensor, unpack_tensor


class TensorList:
    """One tensor a row, of any shapes, on one device.

    Raises:
        ValueError: There is no tensor, or they are on several devices.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        if not self.tensors:
            raise ValueError("a TensorList needs at least one tensor")
        devices = {tensor.device for tensor in self.tensors}
        if len(devices) > 1:
            raise ValueError(f"the tensors of a TensorList must share a device, got {sorted(map(str, devices))}")

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> Any:
        """Return one tensor for an int, else a TensorList of the chosen ones."""
        if isinstance(index, int):
            return self.tensors[index]
        if isinstance(index, slice):
            return TensorList(self.tensors[index])
        chosen = index.tolist() if isinstance(index, Tensor) else index
        return TensorList([self.tensors[i] for i in chosen])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorList):
            return NotImplemented
        return len(self) == len(other) and all(map(_same, self.tensors, other.tensors))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TensorList({[tuple(tensor.shape) for tensor in self.tensors]})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _unpack_list, ([pack_tensor(tensor, protocol) for tensor in self.tensors],)

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.tensors[0].device

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> TensorList:
        """Return the tensors on a device; `dtype` applies to floating-point ones."""
        return TensorList([_to(tensor, device, dtype, non_blocking) for tensor in self.tensors])

    def contiguous(self) -> TensorList:
        """Return the tensors, each contiguous in memory."""
        return TensorList([tensor.contiguous() for tensor in self.tensors])

    def repeat(self, times: int) -> TensorList:
        """Tile the rows: a b → a b a b."""
        return TensorList(self.tensors * times)

    def repeat_interleave(self, times: int) -> TensorList:
        """Repeat each row: a b → a a b b."""
        return TensorList([tensor for tensor in self.tensors for _ in range(times)])

    @classmethod
    def cat(cls, lists: Sequence[TensorList]) -> TensorList:
        """Join the rows of several lists."""
        return cls([tensor for part in lists for tensor in part.tensors])


BatchT = TypeVar("BatchT", bound="TensorBatch")

Column = Tensor | TensorList | None
"""What a batch holds under a key; None says that the column is absent."""


class TensorBatch(dict[str, Any]):
    """Columns by name, with `metadata` about all rows.

    Every column that is not None has the same number of rows and the same device. `len()` is the number of
    rows. Sub-batches share the memory of their columns and have their own metadata dict, so that writing a
    key of one leaves the other alone. The metadata is about the whole and is not cut with the rows.

    Example: `TensorBatch({"sequences": torch.zeros(4, 16)}, metadata={"response_length": 8})`.

    Raises:
        ValueError: A column has another number of rows or another device than the rest, or is none of the
            types of `Column`.
    """

    def __init__(
        self, columns: Mapping[str, Column] | Iterable[tuple[str, Column]] = (), metadata: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.metadata: dict[str, Any] = {} if metadata is None else metadata
        self.update(columns)

    def __setitem__(self, key: str, value: Column) -> None:
        if value is not None:
            self._check(key, value)
        super().__setitem__(key, value)

    def _check(self, key: str, value: Any) -> None:
        if not isinstance(value, Tensor | TensorList):
            raise ValueError(f"{key} must be a tensor or TensorList, got {type(value).__name__}")
        if isinstance(value, Tensor) and value.ndim == 0:
            raise ValueError(f"{key} must have rows, got a tensor without dimensions")
        for name, other in self.items():
            if other is None or name == key:
                continue
            if len(value) != len(other):
                raise ValueError(f"Batch size mismatch in {key}: {len(value)} rows, but {name} has {len(other)}")
            if value.device != other.device:
                raise ValueError(f"Device mismatch in {key}: on {value.device}, but {name} is on {other.device}")
            return

    def update(self, columns: Any = (), /, **more: Column) -> None:
        """Set several columns, each checked."""
        for key, value in dict(columns, **more).items():
            self[key] = value

    def setdefault(self, key: str, default: Column = None) -> Any:
        """Return the column, set to `default` first where the key is missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, columns: Any) -> Self:  # type: ignore[override, misc]
        self.update(columns)
        return self

    def __len__(self) -> int:
        return self.batch_size

    def __getitem__(self, index: Any) -> Any:
        """Return a column for a name, a sub-batch for an int (one row) or a slice."""
        if isinstance(index, str):
            return super().__getitem__(index)
        if isinstance(index, slice):
            return self._map(lambda column: column[index])
        row = range(self.batch_size)[index]
        return self._map(lambda column: column[row : row + 1])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorBatch):
            return NotImplemented
        return (
            self.metadata == other.metadata
            and self.keys() == other.keys()
            and all(_same(value, other[key]) for key, value in self.items())
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __repr__(self) -> str:
        shapes = {
            key: f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            for key, value in self.items()
        }
        return f"{type(self).__name__}(rows={self.batch_size}, {shapes}, metadata keys={sorted(self.metadata)})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        columns = {
            key: pack_tensor(value, protocol) if isinstance(value, Tensor) else value for key, value in self.items()
        }
        return _unpack_batch, (type(self), columns, self.metadata)

    def _map(self, change: Callable[[Any], Any]) -> Self:
        columns = {key: None if value is None else change(value) for key, value in self.items()}
        return assemble_batch(type(self), columns, dict(self.metadata))

    @property
    def batch_size(self) -> int:
        """Rows; 0 for a batch without columns."""
        return next((len(value) for value in self.values() if value is not None), 0)

    @property
    def device(self) -> torch.device | None:
        """The device of all columns; None for a batch without columns."""
        return next((value.device for value in self.values() if value is not None), None)

    def copy(self) -> Self:
        """Return a batch with the same columns, whose keys and metadata can be set on their own."""
        return self._map(lambda column: column)

    def select(self, keys: Iterable[str], metadata_keys: Iterable[str] | None = None) -> Self:
        """Return the batch with these columns, and these metadata (None: all).

        Raises:
            KeyError: A key is missing.
        """
        kept = self.metadata if metadata_keys is None else {key: self.metadata[key] for key in metadata_keys}
        return assemble_batch(type(self), {key: self[key] for key in keys}, dict(kept))

    def slice(self, start: int, end: int, step: int = 1) -> Self:
        """Return rows [start, end)."""
        return self[start:end:step]

    def chunk(self, chunk_size: int) -> list[Self]:
        """Cut into consecutive parts of `chunk_size` rows; the last may be shorter."""
        return [self[start : start + chunk_size] for start in range(0, self.batch_size, chunk_size)]

    def repeat(self, repeats: int) -> Self:
        """Tile the rows: a b → a b a b."""
        return self._map(lambda column: _repeat(column, repeats))

    def repeat_interleave(self, repeats: int) -> Self:
        """Repeat each row: a b → a a b b."""
        return self._map(
            lambda column: (
                column.repeat_interleave(repeats, dim=0)
                if isinstance(column, Tensor)
                else column.repeat_interleave(repeats)
            )
        )

    @classmethod
    def cat(cls, shards: Sequence[TensorBatch]) -> Self:
        """Join the rows of batches with equal keys; the metadata is that of the first.

        Raises:
            ValueError: There is no batch, or their keys differ.
        """
        if not shards:
            raise ValueError("cat needs at least one batch")
        first = shards[0]
        for shard in shards[1:]:
            if shard.keys() != first.keys():
                raise ValueError(f"cannot join batches with keys {sorted(first)} and {sorted(shard)}")
        columns = {key: cat_columns(key, [shard[key] for shard in shards]) for key in first}
        return assemble_batch(cls, columns, dict(first.metadata))

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> Self:
        """Move all columns in place; `dtype` applies to floating-point ones, ids and masks keep theirs."""
        moved = {
            key: value.to(device, dtype, non_blocking=non_blocking)
            if isinstance(value, TensorList)
            else None
            if value is None
            else _to(value, device, dtype, non_blocking)
            for key, value in self.items()
        }
        super().update(moved)
        return self

    def contiguous(self) -> Self:
        """Make all columns contiguous in memory, in place."""
        super().update({key: None if value is None else value.contiguous() for key, value in self.items()})
        return self

    def save(self, path: str | Path) -> None:
        """Write columns and metadata to one safetensors file.

        Raises:
            ValueError: The metadata holds something that JSON cannot.
        """
        columns = {key: value.tensors if isinstance(value, TensorList) else value for key, value in self.items()}
        batch_file.save(str(path), columns, self.metadata)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote."""
        columns, metadata = batch_file.load(str(path))
        return cls(
            {key: TensorList(value) if isinstance(value, list) else value for key, value in columns.items()}, metadata
        )


def _to(tensor: Tensor, device: torch.device | str | None, dtype: torch.dtype | None, non_blocking: bool) -> Tensor:
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None, non_blocking=non_blocking)


def _repeat(column: Tensor | TensorList, times: int) -> Tensor | TensorList:
    if isinstance(column, TensorList):
        return column.repeat(times)
    return column.repeat(times, *[1] * (column.ndim - 1))


def cat_columns(key: str, columns: list[Any]) -> Column:
    """Join the parts of one column; None only where it is None in every part."""
    if all(column is None for column in columns):
        return None
    if isinstance(columns[0], TensorList):
        return TensorList.cat(columns)
    if any(column is None for column in columns):
        raise ValueError(f"cannot join {key}: it is None in some batches only")
    return torch.cat(columns)


def _same(one: Column, other: Column) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    return type(one) is type(other) and (one is None or one == other)


def assemble_batch(kind: type[BatchT], columns: dict[str, Any], metadata: dict[str, Any]) -> BatchT:
    """Make a batch without the checks of its constructor, from columns that are known to fit."""
    batch = kind.__new__(kind)
    dict.update(batch, columns)
    batch.metadata = metadata
    return batch


def _unpack_batch(kind: type[TensorBatch], columns: dict[str, Any], metadata: dict[str, Any]) -> TensorBatch:
    unpacked = {key: unpack_tensor(value) if isinstance(value, tuple) else value for key, value in columns.items()}
    return assemble_batch(kind, unpacked, metadata)


def _unpack_list(packed: list[PackedTensor]) -> TensorList:
    return TensorList([unpack_tensor(one) for one in packed])
