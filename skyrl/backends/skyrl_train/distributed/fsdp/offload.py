"""Move a sharded model and its optimizer state between the GPU and host memory; nothing moves on a CPU."""

from __future__ import annotations

import torch
from torch import nn

from skyrl.backends.skyrl_train import device


def move_model(model: nn.Module, to_device: bool) -> None:
    """Move parameters and buffers to the training device, or to the host."""
    if not device.host_offload_useful():
        return
    model.to(device.device() if to_device else "cpu", non_blocking=True)
    device.synchronize()


@torch.no_grad()
def move_optimizer(optimizer: torch.optim.Optimizer, to_device: bool) -> None:
    """Move the optimizer's moments to the training device, or to the host."""
    if not device.host_offload_useful():
        return
    target = device.device() if to_device else torch.device("cpu")
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = value.to(target, non_blocking=True)
    device.synchronize()
