"""Weight synchronisation: trainer ranks to inference engines, and the proof that it worked."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "BroadcastInitInfo": "group_sender",
    "BroadcastTransferStrategy": "broadcast",
    "CudaIpcTransferStrategy": "cuda_ipc",
    "GlooTransferStrategy": "gloo",
    "WeightChunk": "base",
    "WeightExtractor": "base",
    "WeightSyncInitInfo": "base",
    "WeightSyncSession": "session",
    "WeightTransferSender": "base",
    "WeightTransferStrategy": "base",
    "WeightUpdateRequest": "base",
    "get_transfer_strategy": "strategy",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
