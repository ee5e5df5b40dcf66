"""What every training strategy shares: seeds, and numbers reduced over ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from skyrl.backends.skyrl_train import device

ReduceOp = Literal["mean", "sum", "max", "min"]

_OPS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    device.seed_all(seed)


def all_reduce(
    data: Mapping[str, float] | torch.Tensor | float, op: ReduceOp = "mean", group: dist.ProcessGroup | None = None
) -> dict[str, float] | torch.Tensor | float:
    """Reduce numbers or a tensor over ranks. Collective; a mapping costs one collective and needs equal key sets.

    Returns:
        What was given: a number for a number, a mapping for a mapping, a new tensor for a tensor.

    Raises:
        ValueError: The operation is unknown.
    """
    if op not in _OPS:
        raise ValueError(f"op={op!r} is unknown; use one of {', '.join(_OPS)}")
    if isinstance(data, torch.Tensor):
        return _reduce_tensor(data.clone(), op, group)
    if isinstance(data, Mapping):
        names = sorted(data)
        packed = torch.tensor([float(data[name]) for name in names], dtype=torch.float64, device=device.device())
        return dict(zip(names, _reduce_tensor(packed, op, group).tolist(), strict=True))
    packed = torch.tensor([float(data)], dtype=torch.float64, device=device.device())
    return float(_reduce_tensor(packed, op, group).item())


def _reduce_tensor(tensor: torch.Tensor, op: ReduceOp, group: dist.ProcessGroup | None) -> torch.Tensor:
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return tensor
    dist.all_reduce(tensor, op=_OPS[op], group=group)
    return tensor / dist.get_world_size(group) if op == "mean" else tensor
