"""Write a sharded model as a Hugging Face directory that transformers and vLLM load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from skyrl.backends.skyrl_train.distributed.fsdp.shard import whole_tensor
from skyrl.errors import CheckpointError
from skyrl.utils import storage


def gather_to_rank_zero(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All parameters and floating buffers that a checkpoint holds, whole, on rank 0's CPU; empty elsewhere.

    Collective. One parameter is whole at a time on the other ranks.
    """
    gathered: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        whole = whole_tensor(parameter)
        if dist.get_rank() == 0:
            gathered[name] = whole.to("cpu", dtype, copy=True)
    return gathered


def save_hf_model(path: str, model: Any, dtype: torch.dtype, tokenizer: Any | None) -> None:
    """Export config, weights in ``dtype`` and tokenizer. Collective; a watcher of ``path`` sees all of it or nothing.

    Args:
        path: Directory or bucket path; an older export there is replaced.
        model: The transformers model, sharded.
        dtype: Dtype of the stored weights.
        tokenizer: Saved beside the model when given.

    Raises:
        CheckpointError: The files could not be written.
    """
    write_export(path, model, gather_to_rank_zero(model, dtype), tokenizer)


def write_export(
    path: str,
    model: Any,
    weights: Mapping[str, torch.Tensor],
    tokenizer: Any | None,
    extra: Mapping[str, dict[str, torch.Tensor]] | None = None,
) -> None:
    """Write gathered weights from rank 0; the other ranks wait. Collective.

    Args:
        path: Directory or bucket path.
        model: The transformers model whose config goes along.
        weights: From `gather_to_rank_zero`.
        tokenizer: Saved when given.
        extra: Further safetensors files, name without suffix to tensors.

    Raises:
        CheckpointError: The files could not be written.
    """
    if dist.get_rank() == 0:
        try:
            with storage.atomic_directory(path) as folder:
                model.save_pretrained(folder, state_dict=dict(weights))
                for name, tensors in (extra or {}).items():
                    save_file(tensors, os.path.join(folder, f"{name}.safetensors"))
                if tokenizer is not None:
                    tokenizer.save_pretrained(folder)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"the model could not be exported to {path}: {error}") from error
    dist.barrier()
