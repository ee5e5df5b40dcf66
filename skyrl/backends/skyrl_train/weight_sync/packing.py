"""Pack named tensors into contiguous byte buckets, and take them out again.

Both sides compute the same layout from names, dtypes and shapes: a bucket is filled in metadata order until the
next tensor would exceed its size, each tensor starts at a multiple of 16 bytes, and a tensor larger than a bucket
gets one of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import xxhash

from skyrl.types.weights import WeightChunk, WeightMetadata, torch_dtype

ALIGNMENT_BYTES = 16
"""Every tensor starts at a multiple of this, so that a slice of bytes can be viewed as any dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """Where each tensor lies in one bucket."""

    index: int
    """Position of the bucket in its update, from 0."""
    count: int
    """Buckets of the whole update."""
    names: list[str]
    """Tensors of the bucket, in order."""
    dtype_names: list[str]
    """Their dtypes, for example ``bfloat16``."""
    shapes: list[list[int]]
    """Their shapes."""
    num_bytes: list[int]
    """Bytes that each tensor takes in the bucket, padding included; multiples of 16."""

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes) == len(self.num_bytes):
            raise ValueError("names, dtype_names, shapes and num_bytes of a bucket must have the same length")
        for name, dtype, shape, size in zip(self.names, self.dtype_names, self.shapes, self.num_bytes, strict=True):
            if size % ALIGNMENT_BYTES or size < payload_bytes(dtype, shape):
                raise ValueError(f"{name}: {size} bytes cannot hold {dtype}{shape} padded to {ALIGNMENT_BYTES} bytes")

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole bucket."""
        return sum(self.num_bytes)

    @property
    def is_last(self) -> bool:
        """Whether this bucket ends its update."""
        return self.index == self.count - 1

    def to_update_info(self, checksum: str | None) -> dict[str, Any]:
        """The ``update_info`` that announces this bucket to an engine."""
        return {
            "names": self.names,
            "dtype_names": self.dtype_names,
            "shapes": self.shapes,
            "num_bytes": self.num_bytes,
            "checksum": checksum,
            "index": self.index,
            "count": self.count,
        }


def payload_bytes(dtype_name: str, shape: Sequence[int]) -> int:
    """Bytes of one tensor without padding."""
    return math.prod(shape) * torch_dtype(dtype_name).itemsize


def plan_buckets(metadata: WeightMetadata, bucket_bytes: int) -> list[BucketLayout]:
    """Cut the tensors of one update into buckets of at most ``bucket_bytes``, never reordering them."""
    if bucket_bytes <= 0:
        raise ValueError(f"a bucket needs a positive size, got {bucket_bytes} bytes")
    names, dtypes, shapes = metadata["names"], metadata["dtype_names"], metadata["shapes"]
    payloads = [payload_bytes(dtype, shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
    padded = [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in payloads]
    bounds, used = [0], 0
    for position, size in enumerate(padded):
        if used and used + size > bucket_bytes:
            bounds.append(position)
            used = 0
        used += size
    bounds.append(len(names))
    spans = [(start, stop) for start, stop in pairwise(bounds) if stop > start]
    return [
        BucketLayout(
            index=index,
            count=len(spans),
            names=list(names[start:stop]),
            dtype_names=list(dtypes[start:stop]),
            shapes=[list(shape) for shape in shapes[start:stop]],
            num_bytes=padded[start:stop],
        )
        for index, (start, stop) in enumerate(spans)
    ]


def bucket_views(buffer: torch.Tensor, layout: BucketLayout) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a bucket as views of its bytes.

    ``buffer`` is uint8, holds at least ``layout.size_bytes`` and starts at a multiple of 16 bytes.
    """
    views, offset = [], 0
    for name, dtype, shape, size in zip(layout.names, layout.dtype_names, layout.shapes, layout.num_bytes, strict=True):
        payload = buffer[offset : offset + payload_bytes(dtype, shape)]
        views.append((name, payload.view(torch_dtype(dtype)).view(shape)))
        offset += size
    return views


def named_tensors(chunks: Iterable[WeightChunk]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of every chunk, in order."""
    for chunk in chunks:
        yield from zip(chunk.names, chunk.tensors, strict=True)


def pack_buckets(
    chunks: Iterable[WeightChunk],
    layouts: Sequence[BucketLayout],
    take_buffer: Callable[[int], torch.Tensor] | None,
) -> Iterator[tuple[BucketLayout, torch.Tensor | None]]:
    """Fill one bucket after another from the stream of tensors, casting to the wire dtype while copying.

    ``take_buffer(size)`` returns the uint8 buffer to fill. None only drains the stream, bucket by bucket: what
    ranks do that take part in gathering and send nothing.

    Raises:
        ValueError: the stream differs from the metadata in a name, a shape or the number of tensors.
    """
    stream = named_tensors(chunks)
    for layout in layouts:
        buffer = None if take_buffer is None else take_buffer(layout.size_bytes)
        views = None if buffer is None else bucket_views(buffer, layout)
        for position, (name, shape) in enumerate(zip(layout.names, layout.shapes, strict=True)):
            got, tensor = next(stream, (None, None))
            if tensor is None or got != name:
                raise ValueError(f"weights differ from their metadata: expected {name!r}, got {got!r}")
            if views is not None:
                if list(tensor.shape) != shape:
                    raise ValueError(f"{name}: extracted shape {list(tensor.shape)}, metadata says {shape}")
                views[position][1].copy_(tensor)
        yield layout, buffer
    extra = next(stream, None)
    if extra is not None:
        raise ValueError(f"weights differ from their metadata: {extra[0]!r} comes after the last one listed")


def checksum_bytes(buffer: torch.Tensor) -> str:
    """Checksum of a bucket: xxh3-128 on the CPU; on a GPU the wrapping sum of its 64-bit words, without a copy."""
    if buffer.device.type == "cpu":
        return f"xxh3-128:{xxhash.xxh3_128_hexdigest(buffer.numpy().data)}"
    return f"sum64:{int(buffer.view(torch.int64).sum().item())}"


def require_checksum(buffer: torch.Tensor, expected: str | None, layout: BucketLayout) -> None:
    """Raise ValueError, naming the tensors of the bucket, unless its bytes have the announced checksum.

    Sender and receiver may sit on different devices, so the receiver computes the kind that was announced.
    """
    if expected is None:
        return
    kind = expected.partition(":")[0]
    if kind not in {"xxh3-128", "sum64"}:
        raise ValueError(f"unknown checksum {expected!r}; this receiver knows xxh3-128 and sum64")
    got = checksum_bytes(buffer.cpu()) if kind == "xxh3-128" else f"sum64:{int(buffer.view(torch.int64).sum().item())}"
    if got != expected:
        span = layout.names[0] if len(layout.names) == 1 else f"{layout.names[0]} … {layout.names[-1]}"
        raise ValueError(
            f"bucket {layout.index + 1} of {layout.count} ({span}) arrived damaged: "
            f"checksum {got}, announced {expected}"
        )
