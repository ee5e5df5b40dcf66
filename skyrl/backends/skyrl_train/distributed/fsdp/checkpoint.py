"""Checkpoints of one role: `torch.distributed.checkpoint` for tensors, one small file for the rest.

```
dcp/             model.<name>, optimizer.{exp_avg,exp_avg_sq,step}.<name>; loads at any world size
extra_state.pt   lr_scheduler, param_groups, client_state, world_size, rng by rank; loaded weights_only
huggingface/     config and tokenizer
```
Tensors are named after the Hugging Face model. A tied head is stored once. Optimizer state is read from the
optimizer as it is: torch's `get_state_dict` would invent a first step. The directory is complete when the call
returns; making it visible atomically is the caller's part (the trainer renames the whole step).
"""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from skyrl.backends.skyrl_train import device
from skyrl.backends.skyrl_train.distributed.fsdp.optimizer import OptimizerSteps
from skyrl.backends.skyrl_train.distributed.strategy import seed_everything
from skyrl.errors import CheckpointError
from skyrl.utils import storage

logger = logging.getLogger(__name__)

TENSORS, EXTRA, HUGGINGFACE = "dcp", "extra_state.pt", "huggingface"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def save(
    ckpt_dir: str,
    model: nn.Module,
    steps: OptimizerSteps | None,
    *,
    client_state: Mapping[str, Any] | None = None,
    hf_model: Any | None = None,
    tokenizer: Any | None = None,
) -> None:
    """Write a checkpoint. Collective.

    Args:
        ckpt_dir: Local directory or bucket path; an older checkpoint in it is replaced.
        model: Parameters named as in the checkpoint.
        steps: Optimizer and schedule; None saves none.
        client_state: Plain values (numbers, strings, tensors) of the caller.
        hf_model: The transformers model whose config goes to ``huggingface/``.
        tokenizer: Saved beside it.

    Raises:
        CheckpointError: The files could not be written.
    """
    from torch.distributed import checkpoint as dcp

    rng = _gather_rng()
    failure: BaseException | None = None
    try:
        with storage.local_work_dir(ckpt_dir) as folder:
            tensors = os.path.join(folder, TENSORS)
            if dist.get_rank() == 0:
                shutil.rmtree(tensors, ignore_errors=True)
            dist.barrier()
            dcp.save(_tensor_tree(model, steps), storage_writer=dcp.FileSystemWriter(tensors))
            if dist.get_rank() == 0:
                extra = _schedule_state(steps) | {
                    "client_state": dict(client_state or {}),
                    "world_size": dist.get_world_size(),
                    "rng": rng,
                }
                torch.save(extra, os.path.join(folder, EXTRA))
                _save_huggingface(os.path.join(folder, HUGGINGFACE), hf_model, tokenizer)
    except (OSError, RuntimeError, dcp.api.CheckpointException) as error:  # torch.save on a full disk: RuntimeError
        failure = error
    if not _all_succeeded(failure is None):
        reason = "another rank failed" if failure is None else _reason(failure)
        raise CheckpointError(f"checkpoint {ckpt_dir} could not be written: {reason}") from failure


def _all_succeeded(succeeded: bool) -> bool:
    """Whether every rank passed True. Collective: no rank waits for one that failed."""
    flag = torch.tensor(int(succeeded))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def load(
    ckpt_dir: str | None,
    model: nn.Module,
    steps: OptimizerSteps | None,
    *,
    load_scheduler: bool = True,
    seed: int = 0,
) -> dict[str, Any]:
    """Read a checkpoint of any world size into the model and the optimizer. Collective.

    With the world size that wrote it every rank's random state comes back; with another one generators are seeded from
    (seed, optimizer step, rank).

    Args:
        ckpt_dir: What `save` wrote.
        model: The model, as sharded now.
        steps: Optimizer and schedule to restore; None leaves the live ones untouched.
        load_scheduler: Whether schedule and learning rate come back, too.
        seed: The rank's own seed.

    Returns:
        The ``client_state``.

    Raises:
        ValueError: No directory was given.
        FileNotFoundError: The directory or a part of it is missing.
        CheckpointError: It holds another model.
    """
    if ckpt_dir is None:
        raise ValueError("load_checkpoint needs a directory, got ckpt_dir=None")
    with storage.local_read_dir(ckpt_dir) as folder:
        for part in (os.path.join(TENSORS, ".metadata"), EXTRA):
            if not os.path.exists(os.path.join(folder, part)):
                raise FileNotFoundError(f"{ckpt_dir} is no checkpoint of this library: {part} is missing")
        extra: dict[str, Any] = torch.load(os.path.join(folder, EXTRA), weights_only=True, map_location="cpu")
        _load_tensors(os.path.join(folder, TENSORS), ckpt_dir, model, steps)
    if steps is not None and load_scheduler and "lr_scheduler" in extra:
        _restore_schedule(steps, extra)
    _restore_rng(extra, seed)
    dist.barrier()
    client_state: dict[str, Any] = extra["client_state"]
    return client_state


def _tensor_tree(model: nn.Module, steps: OptimizerSteps | None) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tree: dict[str, Any] = {"model": {name: parameter.detach() for name, parameter in model.named_parameters()}}
    tree["model"] |= _persistent_buffers(model)
    if steps is not None and steps.optimizer.state:
        state = {names[id(parameter)]: values for parameter, values in steps.optimizer.state.items()}
        tree["optimizer"] = {moment: {name: values[moment] for name, values in state.items()} for moment in _MOMENTS}
    return tree


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    buffers = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers[f"{prefix}.{name}" if prefix else name] = buffer
    return buffers


def _load_tensors(folder: str, ckpt_dir: str, model: nn.Module, steps: OptimizerSteps | None) -> None:
    from torch.distributed import checkpoint as dcp

    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    has_optimizer = any(name.startswith("optimizer.") for name in stored)
    if steps is not None:
        _reset_optimizer(steps, allocate=has_optimizer)
    tree = _tensor_tree(model, steps if has_optimizer else None)
    missing = [name for name in tree["model"] if f"model.{name}" not in stored]
    if missing:
        raise CheckpointError(
            f"{ckpt_dir} holds another model: {missing[0]} and {len(missing) - 1} more tensors are not in it; "
            "is <role>.model.path the one that wrote it?"
        )
    try:
        dcp.load(tree, storage_reader=reader)
    except (OSError, ValueError, dcp.api.CheckpointException) as error:
        raise CheckpointError(f"{ckpt_dir} could not be read: {_reason(error)}") from error


def _reset_optimizer(steps: OptimizerSteps, *, allocate: bool) -> None:
    """Empty the optimizer, or give every parameter zero moments for the loader to fill."""
    steps.optimizer.state.clear()
    if not allocate:
        return
    for group in steps.optimizer.param_groups:
        for parameter in group["params"]:
            local = (
                parameter.to_local().device
                if isinstance(parameter, torch.distributed.tensor.DTensor)
                else parameter.device
            )
            steps.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=local),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }


def _schedule_state(steps: OptimizerSteps | None) -> dict[str, Any]:
    if steps is None:
        return {}
    groups = [
        {name: value for name, value in group.items() if name != "params"} for group in steps.optimizer.param_groups
    ]
    return {
        "lr_scheduler": steps.scheduler.state_dict(),
        "scheduler_enabled": steps.scheduler_enabled,
        "lr": [group["lr"] for group in groups],
        "initial_lr": [group["initial_lr"] for group in groups],
    }


def _restore_schedule(steps: OptimizerSteps, extra: Mapping[str, Any]) -> None:
    steps.scheduler.load_state_dict(extra["lr_scheduler"])
    steps.scheduler_enabled = extra["scheduler_enabled"]
    for group, lr, initial in zip(steps.optimizer.param_groups, extra["lr"], extra["initial_lr"], strict=True):
        group["lr"], group["initial_lr"] = lr, initial


def _rng_state() -> dict[str, Any]:
    name, keys, *position = np.random.get_state()
    assert name == "MT19937"
    version, words, gauss = random.getstate()
    return device.rng_state() | {
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), *[float(value) for value in position]],
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
    }


def _gather_rng() -> list[dict[str, Any]]:
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, _rng_state())
    return states


def _restore_rng(extra: Mapping[str, Any], seed: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    if extra["world_size"] != world:
        step = int(extra.get("lr_scheduler", {}).get("last_epoch", 0))
        if rank == 0:
            logger.warning(
                "The checkpoint was written by %d ranks and is read by %d: random generators are seeded anew from "
                "(seed, step, rank)",
                extra["world_size"],
                world,
            )
        seed_everything((seed * 1_000_003 + step) % 2**31 + rank)
        return
    state = extra["rng"][rank]
    device.set_rng_state(state)
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), int(position), int(has_gauss), cached))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))


def _save_huggingface(folder: str, hf_model: Any | None, tokenizer: Any | None) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    if hf_model is not None:
        hf_model.config.save_pretrained(folder)
        if hf_model.can_generate():
            hf_model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _reason(error: BaseException) -> str:
    """First line of what went wrong below torch's own wrapper."""
    failures = vars(error).get("failures") or vars(error).get("_failures")
    if failures:
        first = next(iter(failures.values()))
        error = first[0] if isinstance(first, tuple) else first
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[-1] if text else 'no message'}"
