"""Host memory for received buckets."""

from __future__ import annotations

import torch


class ReceiveBuffers:
    """Host buffers that are used again, once nothing else refers to their memory.

    New memory costs as much as the wire: every page of it must be mapped and zeroed first. vLLM keeps views of a
    buffer until the last tensor of a layer has come, so reuse is decided by the storage's own count of references.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._buffers: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor:
        """An uint8 buffer of ``size`` bytes that nobody else uses."""
        for buffer in self._buffers:
            if buffer.numel() >= size and _only_reference(buffer):
                return buffer[:size]
        fresh = torch.empty(size, dtype=torch.uint8)
        self._buffers = [buffer for buffer in self._buffers if buffer.numel() >= size or not _only_reference(buffer)]
        if sum(buffer.numel() for buffer in self._buffers) + size <= self._keep_bytes:
            self._buffers.append(fresh)
        return fresh[:size]


def _only_reference(buffer: torch.Tensor) -> bool:
    # Two references: that of `buffer`, and that of the storage object made here to ask.
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) == 2
