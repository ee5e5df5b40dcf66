"""Prove that an engine computes with the trainer's weights: the same pure functions run on both sides.

A proof of one version looks at a few tensors, drawn from (run seed, version), and of each at a few input columns
(the last axis; elements of a vector). Both sides hash those values; equal values give equal hashes whatever the
sharding, device or kernel layout they were read from.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

import torch
import xxhash

from skyrl.types.weights import FingerprintPlan, TensorSample, TensorShard, WeightMetadata, fingerprint_key

PROOF_TENSORS = 16
"""Tensors of one sampled proof."""
PROOF_COLUMNS = 16
"""Columns (of a vector: elements) of each."""


def draw_plan(
    metadata: WeightMetadata,
    *,
    seed: int,
    version: int,
    num_tensors: int = PROOF_TENSORS,
    num_columns: int = PROOF_COLUMNS,
    shards: Mapping[str, Sequence[TensorShard | None]] | None = None,
) -> FingerprintPlan:
    """Draw which values the proof of one version looks at; equal arguments give equal plans anywhere.

    ``shards`` are the slices that engine workers hold, by tensor name; whole tensors when left out.
    """
    rng = random.Random(f"skyrl weight proof, seed {seed}, version {version}")
    order = sorted(range(len(metadata["names"])), key=metadata["names"].__getitem__)
    chosen = rng.sample(order, min(num_tensors, len(order)))
    samples = []
    for index in chosen:
        name, shape = metadata["names"][index], tuple(metadata["shapes"][index])
        width = shape[-1] if shape else 1
        columns = tuple(sorted(rng.sample(range(width), min(num_columns, width))))
        held = tuple((shards or {}).get(name, (None,)))
        samples.append(TensorSample(name=name, shape=shape, columns=columns, shards=held))
    return FingerprintPlan(version=version, samples=tuple(samples))


def full_plan(metadata: WeightMetadata, *, version: int) -> FingerprintPlan:
    """Every column of every tensor, whole."""
    return FingerprintPlan(
        version=version,
        samples=tuple(
            TensorSample(name=name, shape=tuple(shape))
            for name, shape in zip(metadata["names"], metadata["shapes"], strict=True)
        ),
    )


def local_columns(sample: TensorSample, shard: TensorShard | None) -> list[int]:
    """The sampled columns that a slice holds, as indices into the slice, ascending."""
    width = sample.shape[-1] if sample.shape else 1
    columns = range(width) if sample.columns is None else sample.columns
    if shard is None or shard.dim != max(len(sample.shape) - 1, 0):
        return list(columns)
    return [column - shard.start for column in columns if shard.start <= column < shard.stop]


def hash_values(values: torch.Tensor) -> str:
    """xxh3-128 of a tensor's shape and values; the dtype does not count, and -0.0 is 0.0.

    Values are compared as float32, which holds every bfloat16, float16 and float32 exactly.
    """
    exact = (values.detach().to(device="cpu", dtype=torch.float32) + 0.0).contiguous()
    digest = xxhash.xxh3_128(repr(tuple(exact.shape)).encode())
    digest.update(exact.numpy().data)
    return digest.hexdigest()


def fingerprint_tensor(tensor: torch.Tensor, sample: TensorSample) -> dict[str, str]:
    """Hash the sampled columns of a whole tensor, once per slice that some engine worker holds."""
    if tuple(tensor.shape) != sample.shape:
        raise ValueError(f"{sample.name}: shape {tuple(tensor.shape)}, the plan says {sample.shape}")
    whole = tensor if tensor.dim() else tensor.reshape(1)
    hashes = {}
    for shard in sample.shards:
        piece = whole if shard is None else whole.narrow(shard.dim, shard.start, shard.stop - shard.start)
        columns = torch.tensor(local_columns(sample, shard), dtype=torch.long, device=piece.device)
        hashes[fingerprint_key(sample.name, shard)] = hash_values(piece.index_select(-1, columns))
    return hashes


def fingerprint_tensors(named: Iterable[tuple[str, torch.Tensor]], plan: FingerprintPlan) -> dict[str, str]:
    """Hash a stream of whole tensors by a plan; the stream holds the plan's names in its order."""
    hashes: dict[str, str] = {}
    samples = iter(plan)
    for name, tensor in named:
        sample = next(samples, None)
        if sample is None or sample.name != name:
            raise ValueError(f"the proof asked for {sample.name if sample else None!r}, the extractor gave {name!r}")
        hashes |= fingerprint_tensor(tensor, sample)
    missing = next(samples, None)
    if missing is not None:
        raise ValueError(f"the proof asked for {missing.name!r}, the extractor gave nothing")
    return hashes
