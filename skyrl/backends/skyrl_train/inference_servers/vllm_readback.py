"""Read checkpoint tensors back out of a running vLLM model, under their Hugging Face names.

vLLM fuses (q, k, v; gate, up), slices (tensor parallelism), pads (vocabulary) and, on a CPU, repacks weights until no
parameter is left to look at. This undoes the first three by the layers' own numbers, and asks packed layers for
columns through their own kernel: a one-hot row times W.T is a column of W, exactly, since every other term is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.utils import PPMissingLayer

from skyrl.backends.skyrl_train.weight_sync.fingerprint import hash_values, local_columns
from skyrl.types.weights import FingerprintPlan, TensorSample, TensorShard

ONE_HOT_ROWS = 256
"""Columns asked from a packed layer in one kernel call; bounds the memory of a whole read-back."""


class Unreadable(Exception):
    """The engine holds the tensor in a form that cannot be read back; says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where a checkpoint tensor lives in this worker's model."""

    module: torch.nn.Module
    """The layer that holds it."""
    leaf: str
    """Name of the parameter in the layer."""
    rows: tuple[int, int] | None
    """Rows of the layer's own (fused or padded) parameter; None means all."""
    shard: TensorShard | None
    """The slice of the whole tensor that those rows are; None means all of it."""
    via: str
    """``parameter`` (it is visible) or ``kernel`` (only the layer's kernel has it)."""


def locate(model: torch.nn.Module, name: str, shape: Sequence[int]) -> list[Location]:
    """Every place in this worker's model that computes with a checkpoint tensor of the given whole shape.

    An embedding that the output head shares is listed twice: as the lookup table and as the head's operand. The
    list is empty if another pipeline stage holds the tensor.

    Raises:
        Unreadable: the layer is quantised, fused in a way not known here, or not found.
    """
    path, part = _map_name(model, name)
    module_path, _, leaf = path.rpartition(".")
    module, part = _find_module(model, module_path, part)
    if isinstance(module, PPMissingLayer):
        return []
    if isinstance(module, VocabParallelEmbedding):
        return _locate_embedding(model, module, leaf, shape)
    if isinstance(module, LinearBase):
        return [_locate_linear(module, leaf, part, shape, name)]
    parameter = dict(module.named_parameters(recurse=False)).get(leaf)
    if parameter is None:
        raise Unreadable(f"{name}: {type(module).__name__} has no parameter {leaf!r}")
    if tuple(parameter.shape) != tuple(shape):
        raise Unreadable(f"{name}: held as {tuple(parameter.shape)} by {type(module).__name__}, not {tuple(shape)}")
    return [Location(module=module, leaf=leaf, rows=None, shard=None, via="parameter")]


def read_columns(location: Location, sample: TensorSample) -> torch.Tensor:
    """The sampled columns (of a vector: elements) of the slice at a location, in the engine's dtype."""
    columns = local_columns(sample, location.shard)
    if location.via == "kernel":
        values = _columns_through_kernel(location.module, columns)
        return values if location.rows is None else values[slice(*location.rows)]
    parameter = location.module.get_parameter(location.leaf).detach()
    held = parameter if location.rows is None else parameter[slice(*location.rows)]
    held = held if held.dim() else held.reshape(1)
    return held.index_select(-1, torch.tensor(columns, dtype=torch.long, device=held.device))


def read_back(model: torch.nn.Module, plan: FingerprintPlan) -> list[dict[str, Any]]:
    """Hash what this worker holds of every planned tensor.

    Returns:
        One record per place: ``name``, ``shard`` (``[dim, start, stop]`` or None), ``via``, and ``hash``; a tensor
        that cannot be read has ``unreadable`` (the reason) instead.
    """
    records: list[dict[str, Any]] = []
    with torch.inference_mode():
        for sample in plan:
            try:
                for location in locate(model, sample.name, sample.shape):
                    records.append(
                        {
                            "name": sample.name,
                            "shard": None if location.shard is None else location.shard.to_json(),
                            "via": location.via,
                            "hash": hash_values(read_columns(location, sample)),
                        }
                    )
            except Unreadable as reason:
                records.append({"name": sample.name, "unreadable": str(reason)})
    return records


def held_shards(model: torch.nn.Module, shapes: dict[str, list[int]]) -> dict[str, list[list[int] | None]]:
    """The slices that this worker holds of every tensor, by name; unreadable ones and other stages' are left out."""
    shards: dict[str, list[list[int] | None]] = {}
    for name, shape in shapes.items():
        try:
            places = locate(model, name, shape)
        except Unreadable:
            continue
        found = {None if place.shard is None else tuple(place.shard.to_json()) for place in places}
        if found:
            shards[name] = [None if shard is None else list(shard) for shard in found]
    return shards


def _map_name(model: torch.nn.Module, name: str) -> tuple[str, Any]:
    """Checkpoint name to parameter path and the part of a fused parameter, by the model's own mapper."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    mapped = (name, None) if mapper is None else mapper._map_name_with_shard(name)
    if mapped is None:
        raise Unreadable(f"{name}: the engine's model ignores this tensor")
    return mapped


def _find_module(model: torch.nn.Module, path: str, part: Any) -> tuple[torch.nn.Module, Any]:
    try:
        return model.get_submodule(path), part
    except AttributeError:
        pass
    parent, _, own = path.rpartition(".")
    packed = getattr(model, "packed_modules_mapping", None) or {}
    for fused, parts in packed.items():
        if own in parts and part is None:
            position = parts.index(own)
            try:
                module = model.get_submodule(f"{parent}.{fused}" if parent else fused)
            except AttributeError:
                continue
            return module, "qkv"[position] if isinstance(module, QKVParallelLinear) else position
    raise Unreadable(f"{path}: no such layer in {type(model).__name__}")


def _locate_embedding(
    model: torch.nn.Module, module: VocabParallelEmbedding, leaf: str, shape: Sequence[int]
) -> list[Location]:
    if not isinstance(module.quant_method, UnquantizedEmbeddingMethod) or leaf not in {"weight", "bias"}:
        raise Unreadable(f"{leaf} of {type(module).__name__} under {type(module.quant_method).__name__}")
    indices = module.shard_indices
    start, stop = indices.org_vocab_start_index, indices.org_vocab_end_index
    shard = None if (start, stop) == (0, shape[0]) else TensorShard(dim=0, start=start, stop=stop)
    common: dict[str, Any] = {"leaf": leaf, "rows": (0, stop - start), "shard": shard}
    if leaf == "bias":
        return [Location(module=module, via="parameter", **common)]
    places = []
    heads = [head for head in _heads(model) if head.weight is module.weight]
    if not isinstance(module, ParallelLMHead) or heads != [module]:
        places.append(Location(module=module, via="parameter", **common))
    places += [Location(module=head, via=_via(head), **common) for head in heads if _via(head) == "kernel"]
    return places or [Location(module=module, via="parameter", **common)]


def _heads(model: torch.nn.Module) -> list[VocabParallelEmbedding]:
    """The layers that compute logits: output heads, and an embedding that doubles as one."""
    found: list[VocabParallelEmbedding] = []
    for path, module in model.named_modules(remove_duplicate=False):
        named_head = path.rpartition(".")[2] == "lm_head" or isinstance(module, ParallelLMHead)
        if isinstance(module, VocabParallelEmbedding) and named_head and all(module is not head for head in found):
            found.append(module)
    return found


def _locate_linear(module: LinearBase, leaf: str, part: Any, shape: Sequence[int], name: str) -> Location:
    if not isinstance(module.quant_method, UnquantizedLinearMethod):
        raise Unreadable(f"{name}: quantised by {type(module.quant_method).__name__}")
    if leaf not in {"weight", "bias"} or len(shape) > 2:
        raise Unreadable(f"{name}: {leaf} of {type(module).__name__} with {len(shape)} axes")
    via = _via(module) if leaf == "weight" else "parameter"
    if isinstance(module, RowParallelLinear):
        size = module.input_size_per_partition
        split = leaf == "weight" and module.tp_size > 1
        shard = TensorShard(dim=1, start=module.tp_rank * size, stop=(module.tp_rank + 1) * size) if split else None
        return Location(module=module, leaf=leaf, rows=None, shard=shard, via=via)
    if not isinstance(module, ColumnParallelLinear):
        return Location(module=module, leaf=leaf, rows=None, shard=None, via=via)
    offset, size, index, pieces = _own_rows(module, part, name)
    shard = None if pieces == 1 else TensorShard(dim=0, start=index * size, stop=(index + 1) * size)
    if size * pieces != shape[0]:
        raise Unreadable(f"{name}: {size} rows times {pieces} pieces are not the {shape[0]} rows of the checkpoint")
    return Location(module=module, leaf=leaf, rows=(offset, offset + size), shard=shard, via=via)


def _own_rows(module: ColumnParallelLinear, part: Any, name: str) -> tuple[int, int, int, int]:
    """Offset and size of a part in the fused rows of this worker, its index among equal pieces, and their number."""
    if isinstance(module, QKVParallelLinear):
        if part not in ("q", "k", "v"):
            raise Unreadable(f"{name}: part {part!r} of a fused q, k, v")
        offset, size = module._get_shard_offset_mapping(part), module._get_shard_size_mapping(part)
        replicas = 1 if part == "q" else module.num_kv_head_replicas
        return offset, size, module.tp_rank // replicas, module.tp_size // replicas
    if isinstance(module, MergedColumnParallelLinear):
        if not isinstance(part, int):
            raise Unreadable(f"{name}: part {part!r} of a fused {type(module).__name__}")
        sizes = [size // module.tp_size for size in module.output_sizes]
        return sum(sizes[:part]), sizes[part], module.tp_rank, module.tp_size
    return 0, module.output_size_per_partition, module.tp_rank, module.tp_size


def _via(module: torch.nn.Module) -> str:
    """A CPU engine multiplies with a packed copy; elsewhere the parameter itself is the operand."""
    return "kernel" if module.weight.device.type == "cpu" else "parameter"


def _columns_through_kernel(module: Any, columns: Sequence[int]) -> torch.Tensor:
    """Columns of a layer's weight, ``[rows, len(columns)]``, as its own kernel multiplies them."""
    width = module.embedding_dim if isinstance(module, VocabParallelEmbedding) else module.input_size_per_partition
    dtype = module.params_dtype
    pieces = []
    for start in range(0, len(columns), ONE_HOT_ROWS):
        wanted = torch.tensor(columns[start : start + ONE_HOT_ROWS], dtype=torch.long)
        rows = torch.zeros(len(wanted), width, dtype=dtype)
        rows[torch.arange(len(wanted)), wanted] = 1.0
        pieces.append(module.quant_method.apply(module, rows, None).T)
    if not pieces:
        height = module.quant_method.apply(module, torch.zeros(1, width, dtype=dtype), None).shape[-1]
        return torch.empty(height, 0, dtype=dtype)
    return torch.cat(pieces, dim=1)
