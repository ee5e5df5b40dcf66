"""Read whole tensors out of an FSDP2 model, under the names of its Hugging Face checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from skyrl.backends.skyrl_train.distributed.fsdp.shard import whole_tensor
from skyrl.types.weights import WeightChunk, WeightMetadata

CHUNK_BYTES = 64 << 20


class FSDPWeightExtractor:
    """Implements `weight_sync.base.WeightExtractor` for a transformers model.

    A tied head is left out: engines share the embedding, too. Some models hold several tensors of the checkpoint as
    one (experts); such a parameter is taken apart the way transformers saves it.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @functools.cached_property
    def _parts(self) -> dict[str, dict[str, list[int]]]:
        """Checkpoint names and shapes by parameter name, in order."""
        parts = {}
        for name, parameter in self._model.named_parameters():
            stand_in = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            parts[name] = {part: list(value.shape) for part, value in self._split(name, stand_in).items()}
        return parts

    def _split(self, name: str, whole: Tensor) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self._model, {name: whole}))

    def _checkpoint_tensors(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        """Whole tensors of one parameter. Collective."""
        whole = whole_tensor(parameter)
        return {name: whole} if list(self._parts[name]) == [name] else self._split(name, whole)

    def get_weight_metadata(self, dtype: torch.dtype) -> WeightMetadata:
        """Names, wire dtypes and global shapes in extraction order; gathers nothing."""
        shapes = {name: shape for parts in self._parts.values() for name, shape in parts.items()}
        wire = str(dtype).removeprefix("torch.")
        return WeightMetadata(names=list(shapes), dtype_names=[wire] * len(shapes), shapes=list(shapes.values()))

    def extract_weights(self, dtype: torch.dtype) -> Iterator[WeightChunk]:
        """Yield every tensor once, whole, in chunks of at least `CHUNK_BYTES`. Collective; masters are not cast."""
        pending: dict[str, Tensor] = {}
        for name, parameter in self._model.named_parameters():
            pending |= self._checkpoint_tensors(name, parameter)
            if sum(tensor.nbytes for tensor in pending.values()) >= CHUNK_BYTES:
                yield _chunk(pending, dtype)
                pending = {}
        if pending:
            yield _chunk(pending, dtype)

    def extract_named(self, names: Sequence[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors, whole and cast to ``dtype``. Collective.

        Raises:
            KeyError: a name that `get_weight_metadata` does not list.
        """
        owners = {part: name for name, parts in self._parts.items() for part in parts}
        parameters = dict(self._model.named_parameters())
        for name in names:
            if name not in owners:
                raise KeyError(f"{name!r} is no tensor of this model's checkpoint")
            tensors = self._checkpoint_tensors(owners[name], parameters[owners[name]])
            yield name, tensors[name].to(dtype)


def _chunk(tensors: dict[str, Tensor], dtype: torch.dtype) -> WeightChunk:
    return WeightChunk(
        names=list(tensors),
        dtypes=[str(dtype)] * len(tensors),
        shapes=[list(tensor.shape) for tensor in tensors.values()],
        tensors=list(tensors.values()),
    )
