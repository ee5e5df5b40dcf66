"""Choose how weights travel, once, at start-up."""

from __future__ import annotations

from skyrl.backends.skyrl_train.weight_sync.base import WeightTransferStrategy
from skyrl.backends.skyrl_train.weight_sync.broadcast import BroadcastTransferStrategy
from skyrl.backends.skyrl_train.weight_sync.cuda_ipc import CudaIpcTransferStrategy
from skyrl.backends.skyrl_train.weight_sync.gloo import GlooTransferStrategy
from skyrl.errors import ConfigError

KEY = "generator.inference_engine.weight_sync_backend"


def get_transfer_strategy(backend: str, colocate_all: bool, device_type: str) -> type[WeightTransferStrategy]:
    """The strategy that a configuration asks for.

    ``device_type`` is ``cuda`` when trainer and engines are both on GPUs, else ``cpu``. ``auto`` means nccl with
    GPUs on both sides and gloo otherwise; nccl on shared GPUs is CUDA IPC.

    Raises:
        ConfigError: an unknown backend, one that is not built yet, or nccl without GPUs.
    """
    if backend == "gloo" or (backend == "auto" and device_type != "cuda"):
        return GlooTransferStrategy
    if backend in {"auto", "nccl"}:
        if device_type != "cuda":
            raise ConfigError(
                f"{KEY}=nccl needs GPUs on both sides, and one side is on {device_type}; use auto or gloo"
            )
        return CudaIpcTransferStrategy if colocate_all else BroadcastTransferStrategy
    if backend in {"delta", "sharded_rdt", "rdt"}:
        raise ConfigError(f"{KEY}={backend} is not built yet; use auto, gloo or nccl")
    raise ConfigError(f"{KEY}={backend!r} is unknown; use auto, gloo or nccl")
