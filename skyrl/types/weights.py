"""What weight synchronisation carries between trainer, control plane and engines.

Names and shapes are those of the Hugging Face checkpoint, whole tensors: how a trainer or an engine
shards them is its own affair. Dtypes are strings with the prefix (``torch.bfloat16``) in chunks and
requests, and without it (``bfloat16``) in metadata, as vLLM's own requests have them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from typing_extensions import TypedDict


class WeightMetadata(TypedDict):
    """Every tensor of one sync, in the order in which it is sent."""

    names: list[str]
    """Names in the Hugging Face checkpoint."""
    dtype_names: list[str]
    """Dtype on the wire, for example ``bfloat16``."""
    shapes: list[list[int]]
    """Global shape of the whole tensor."""


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called ``bfloat16`` or ``torch.bfloat16``; ValueError if there is none."""
    dtype = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype; for example bfloat16, float16 or float32")
    return dtype


def _check_lengths(what: str, names: Sequence[object], **columns: Sequence[object]) -> None:
    for column, values in columns.items():
        if len(values) != len(names):
            raise ValueError(
                f"{what}: names and {column} must have the same length, got {len(names)} names "
                f"and {len(values)} {column}"
            )


@dataclass(frozen=True)
class WeightChunk:
    """Some whole tensors of a model, as an extractor yields them.

    A tensor may still have the trainer's own dtype: ``dtypes`` say what goes on the wire, and packing casts.

    Example: ``WeightChunk(["lm_head.weight"], ["torch.bfloat16"], [[49152, 576]], [tensor])``.
    """

    names: list[str]
    """Names in the Hugging Face checkpoint."""
    dtypes: list[str]
    """Dtype on the wire, for example ``torch.bfloat16``."""
    shapes: list[list[int]]
    """Shape of each tensor."""
    tensors: list[torch.Tensor]
    """The values, on any device."""

    def __post_init__(self) -> None:
        _check_lengths("WeightChunk", self.names, dtypes=self.dtypes, shapes=self.shapes, tensors=self.tensors)

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def total_numel(self) -> int:
        """Elements of all tensors together."""
        return sum(math.prod(shape) for shape in self.shapes)

    @cached_property
    def total_size_bytes(self) -> int:
        """Bytes of all tensors on the wire, without padding."""
        sizes = (torch_dtype(dtype).itemsize for dtype in self.dtypes)
        return sum(math.prod(shape) * size for shape, size in zip(self.shapes, sizes, strict=True))


@dataclass(frozen=True)
class WeightUpdateRequest:
    """Which tensors an engine is about to receive."""

    names: list[str]
    """Names in the Hugging Face checkpoint."""
    dtypes: list[str]
    """Dtype on the wire, for example ``torch.bfloat16``."""
    shapes: list[list[int]]
    """Shape of each tensor."""

    def __post_init__(self) -> None:
        _check_lengths("WeightUpdateRequest", self.names, dtypes=self.dtypes, shapes=self.shapes)

    def __len__(self) -> int:
        return len(self.names)

    def to_json_dict(self) -> dict[str, Any]:
        """The request as plain JSON data."""
        return {"names": list(self.names), "dtypes": list(self.dtypes), "shapes": [list(s) for s in self.shapes]}

    @classmethod
    def from_json_dict(cls, data: Mapping[str, Any]) -> WeightUpdateRequest:
        """The inverse of `to_json_dict`."""
        return cls(list(data["names"]), list(data["dtypes"]), [list(shape) for shape in data["shapes"]])


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """The slice of a whole tensor that one engine worker holds: ``start <= index < stop`` on axis ``dim``."""

    dim: int
    """Axis of the whole tensor."""
    start: int
    """First index held."""
    stop: int
    """One past the last index held."""

    def __post_init__(self) -> None:
        if self.dim < 0 or not 0 <= self.start <= self.stop:
            raise ValueError(f"a shard needs dim >= 0 and 0 <= start <= stop, got {self}")

    def to_json(self) -> list[int]:
        """``[dim, start, stop]``."""
        return [self.dim, self.start, self.stop]

    @classmethod
    def from_json(cls, data: Sequence[int] | None) -> TensorShard | None:
        """The inverse of `to_json`; None (the whole tensor) stays None."""
        return None if data is None else cls(dim=data[0], start=data[1], stop=data[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSample:
    """Which values of one tensor a proof looks at."""

    name: str
    """Name in the Hugging Face checkpoint."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    columns: tuple[int, ...] | None = None
    """Indices along the last axis of the whole tensor, ascending; None means all."""
    shards: tuple[TensorShard | None, ...] = (None,)
    """The slices that engine workers hold; each gets its own hash. None is the whole tensor."""

    def to_json_dict(self) -> dict[str, Any]:
        """The sample as plain JSON data."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "columns": None if self.columns is None else list(self.columns),
            "shards": [None if shard is None else shard.to_json() for shard in self.shards],
        }

    @classmethod
    def from_json_dict(cls, data: Mapping[str, Any]) -> TensorSample:
        """The inverse of `to_json_dict`."""
        columns = data["columns"]
        return cls(
            name=data["name"],
            shape=tuple(data["shape"]),
            columns=None if columns is None else tuple(columns),
            shards=tuple(TensorShard.from_json(shard) for shard in data["shards"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FingerprintPlan:
    """What both sides hash to prove that an engine holds the trainer's weights of one version."""

    version: int
    """Weight version that the proof is for."""
    samples: tuple[TensorSample, ...]
    """The tensors to look at; names are unique."""

    def __iter__(self) -> Iterator[TensorSample]:
        return iter(self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def names(self) -> list[str]:
        """The sampled names, in plan order."""
        return [sample.name for sample in self.samples]

    def to_json_dict(self) -> dict[str, Any]:
        """The plan as plain JSON data, for an engine."""
        return {"version": self.version, "samples": [sample.to_json_dict() for sample in self.samples]}

    @classmethod
    def from_json_dict(cls, data: Mapping[str, Any]) -> FingerprintPlan:
        """The inverse of `to_json_dict`."""
        samples = tuple(TensorSample.from_json_dict(sample) for sample in data["samples"])
        return cls(version=data["version"], samples=samples)


def fingerprint_key(name: str, shard: TensorShard | None) -> str:
    """How results name a hashed tensor: ``name``, or ``name[dim:start:stop]`` for a slice."""
    return name if shard is None else f"{name}[{shard.dim}:{shard.start}:{shard.stop}]"
