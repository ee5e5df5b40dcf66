"""Weight transfer by CUDA IPC: trainer ranks and engine workers that share GPUs.

Every trainer rank packs each bucket in its own GPU's memory and describes it by the driver's handle; rank 0 sends
the handles of all GPUs as JSON, and each engine worker opens the one of its own GPU. No byte leaves the device, and
nothing is pickled: a handle is plain data, rebuilt by one fixed function.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from skyrl.backends.skyrl_train.device import set_expandable_segments
from skyrl.backends.skyrl_train.weight_sync.base import (
    EngineUpdateClient,
    RankAgreement,
    WeightChunk,
    WeightMetadata,
    WeightSyncInitInfo,
    WeightTransferSender,
    WeightTransferStrategy,
)
from skyrl.backends.skyrl_train.weight_sync.gloo import bucket_bytes
from skyrl.backends.skyrl_train.weight_sync.group_sender import TIMEOUT_KEY
from skyrl.backends.skyrl_train.weight_sync.packing import BucketLayout, checksum_bytes, pack_buckets, plan_buckets
from skyrl.backends.skyrl_train.weight_sync.pipeline import OtherRankFailed, SendReport
from skyrl.backends.skyrl_train.weight_sync.threads import SerialThread
from skyrl.config.inference_engine import InferenceEngineConfig
from skyrl.errors import DeadlineError, WeightSyncError

IPC_ENGINE = "skyrl_ipc"
"""Name of the receiver in the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcHandle:
    """What another process needs to open a CUDA storage; byte fields are base64 text."""

    handle: str
    """Driver handle of the allocation."""
    size_bytes: int
    """Bytes of the storage."""
    offset_bytes: int
    """Where the storage begins in the allocation."""
    ref_counter_handle: str
    """Shared-memory file that counts the openers."""
    ref_counter_offset: int
    """Slot in that file."""
    event_handle: str
    """Driver handle of the event that orders writer before reader."""
    event_sync_required: bool
    """Whether the reader must wait for the event."""
    num_bytes: int
    """Bytes of the bucket, from the start of the storage."""


def share_buffer(buffer: torch.Tensor) -> IpcHandle:
    """Describe a CUDA buffer to other processes; its memory stays until every opener has dropped it."""
    _, handle, size, offset, counter, counter_offset, event, must_wait = buffer.untyped_storage()._share_cuda_()
    return IpcHandle(
        handle=_text(handle),
        size_bytes=size,
        offset_bytes=offset,
        ref_counter_handle=_text(counter),
        ref_counter_offset=counter_offset,
        event_handle=_text(event),
        event_sync_required=must_wait,
        num_bytes=buffer.numel(),
    )


def open_handle(handle: IpcHandle, *, device_index: int) -> torch.Tensor:
    """The uint8 bucket behind a handle, as this process sees the GPU."""
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(
        device_index,
        base64.b64decode(handle.handle, validate=True),
        handle.size_bytes,
        handle.offset_bytes,
        base64.b64decode(handle.ref_counter_handle, validate=True),
        handle.ref_counter_offset,
        base64.b64decode(handle.event_handle, validate=True),
        handle.event_sync_required,
    )
    empty = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", device_index))
    return empty.set_(storage, 0, (handle.num_bytes,))  # type: ignore[call-overload]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@contextlib.contextmanager
def _exportable_memory() -> Iterator[None]:
    """Allocate plain segments inside: expandable ones cannot be shared by handle."""
    if not torch.cuda.memory._snapshot()["allocator_settings"].get("expandable_segments", False):
        yield
        return
    set_expandable_segments(False)
    try:
        yield
    finally:
        set_expandable_segments(True)


@dataclass(frozen=True, kw_only=True)
class IpcInitInfo(WeightSyncInitInfo):
    """Nothing to agree on beforehand; its presence marks rank 0."""


class CudaIpcSender(WeightTransferSender):
    """Shares one bucket after another with the engine workers on the trainer's GPUs."""

    def __init__(
        self,
        init_info: IpcInitInfo | None,
        client: EngineUpdateClient,
        *,
        agreement: RankAgreement,
        bucket_bytes: int,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        self._init_info, self._client, self._agreement = init_info, client, agreement
        self._bucket_bytes, self._chunk_timeout_s, self._device = bucket_bytes, timeout_s / 2, device

    @property
    def usable(self) -> bool:
        """See `WeightTransferSender.usable`; nothing is held between transfers."""
        return True

    async def open(self) -> None:
        """See `WeightTransferSender.open`."""
        if self._init_info is not None:
            await self._client.init_weight_update_communicator(self._init_info)

    async def send_chunks(
        self, chunks: Iterable[WeightChunk], weight_metadata: WeightMetadata | None = None
    ) -> dict[str, float]:
        """See `WeightTransferSender.send_chunks`."""
        if weight_metadata is None:
            raise ValueError("CUDA IPC needs the metadata of all weights before the first one is sent")
        layouts = plan_buckets(weight_metadata, self._bucket_bytes)
        with _exportable_memory():
            report = await self._send(chunks, layouts)
        torch.cuda.ipc_collect()
        return report.to_dict() if self._init_info is not None else {}

    async def _send(self, chunks: Iterable[WeightChunk], layouts: Sequence[BucketLayout]) -> SendReport:
        report, thread = SendReport(), SerialThread("weight-share")
        try:
            report.start_s = await self._lead(thread, self._client.start_weight_update)
            buckets = pack_buckets(chunks, layouts, self._new_buffer)
            for _ in layouts:
                await self._share_next(thread, buckets, report)
            await thread.submit(lambda: next(buckets, None))  # checks that the stream ends where the metadata does
            report.finish_s = await self._lead(thread, self._client.finish_weight_update)
        finally:
            thread.close()
        return report

    async def _share_next(
        self, thread: SerialThread, buckets: Iterator[tuple[BucketLayout, torch.Tensor | None]], report: SendReport
    ) -> None:
        """Fill, share and let load one bucket; every rank's buffer lives until all workers have loaded theirs."""
        began = time.perf_counter()
        filled = thread.submit(lambda: self._fill(buckets))
        layout, buffer, checksum, texts = await filled
        report.gather_s += time.perf_counter() - began
        handles: dict[str, Any] = {}
        for text in texts:
            handles |= json.loads(text)
        update = layout.to_update_info(checksum) | {"handles": handles}
        report.send_s += await self._lead(thread, lambda: self._client.update_named_weights(update))
        report.bytes += layout.size_bytes
        del buffer

    def _fill(
        self, buckets: Iterator[tuple[BucketLayout, torch.Tensor | None]]
    ) -> tuple[BucketLayout, torch.Tensor, str, list[str]]:
        error: Exception | None = None
        text, filled = "{}", None
        try:
            filled = next(buckets)
            buffer = filled[1]
            assert buffer is not None
            uuid = str(torch.cuda.get_device_properties(self._device).uuid)
            text = json.dumps({uuid: asdict(share_buffer(buffer))})
            checksum = checksum_bytes(buffer)  # waits until the bucket is filled
        except Exception as caught:  # noqa: BLE001 - raised below, after the other ranks were told
            error = caught
        if not self._agreement.all_ok(error is None):
            raise error or OtherRankFailed
        assert filled is not None and buffer is not None
        return filled[0], buffer, checksum, self._agreement.gather_text(text)

    def _new_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    async def _lead(self, thread: SerialThread, call: Any) -> float:
        """Rank 0 makes a call to the engines, the others wait for its outcome; seconds of the call."""
        began = time.perf_counter()
        error: Exception | None = None
        if self._init_info is not None:
            try:
                await asyncio.wait_for(call(), self._chunk_timeout_s)
            except TimeoutError:
                error = DeadlineError("trainer rank 0", "engines to load a bucket", self._chunk_timeout_s, TIMEOUT_KEY)
            except Exception as caught:  # noqa: BLE001 - raised below, after the other ranks were told
                error = WeightSyncError(f"the weight transfer failed: {caught}")
                error.__cause__ = caught
        seconds = time.perf_counter() - began
        if not await thread.submit(lambda: self._agreement.all_ok(error is None)):
            raise error or OtherRankFailed
        return seconds

    def teardown(self) -> None:
        """See `WeightTransferSender.teardown`."""


class CudaIpcTransferStrategy(WeightTransferStrategy):
    """Buckets in the memory of shared GPUs, passed by handle."""

    @staticmethod
    def create_init_info(
        ie_cfg: InferenceEngineConfig,
        inference_world_size: int | None = None,
        base_model_path: str | None = None,
        *,
        server_urls: Sequence[str] = (),
    ) -> IpcInitInfo:
        """See `WeightTransferStrategy.create_init_info`."""
        del inference_world_size, base_model_path, server_urls
        return IpcInitInfo(override_existing_receiver=not ie_cfg.run_engines_locally)

    @staticmethod
    def create_sender(
        init_info: WeightSyncInitInfo | None,
        inference_client: EngineUpdateClient,
        *,
        ie_cfg: InferenceEngineConfig,
        agreement: RankAgreement,
        device: torch.device,
    ) -> CudaIpcSender:
        """See `WeightTransferStrategy.create_sender`."""
        if init_info is not None and not isinstance(init_info, IpcInitInfo):
            raise TypeError(f"CUDA IPC needs an IpcInitInfo, got {type(init_info).__name__}")
        return CudaIpcSender(
            init_info,
            inference_client,
            agreement=agreement,
            bucket_bytes=bucket_bytes(ie_cfg),
            timeout_s=ie_cfg.weight_sync_timeout_s,
            device=device,
        )

    @staticmethod
    def get_vllm_transfer_engine() -> str:
        """See `WeightTransferStrategy.get_vllm_transfer_engine`."""
        return IPC_ENGINE
