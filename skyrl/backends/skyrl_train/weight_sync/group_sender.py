"""Send buckets from trainer rank 0 to every engine worker by broadcast, over gloo or NCCL.

For every bucket the HTTP call that announces it runs beside the broadcast: the engine posts its receive inside
that call, so neither may be awaited before the other has begun.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from skyrl.backends.skyrl_train.weight_sync.base import (
    EngineUpdateClient,
    RankAgreement,
    WeightChunk,
    WeightMetadata,
    WeightSyncInitInfo,
    WeightTransferSender,
)
from skyrl.backends.skyrl_train.weight_sync.group import Rendezvous, TransferGroup
from skyrl.backends.skyrl_train.weight_sync.packing import BucketLayout, checksum_bytes, pack_buckets, plan_buckets
from skyrl.backends.skyrl_train.weight_sync.pipeline import Bucket, SendReport, drain_buckets, send_buckets
from skyrl.backends.skyrl_train.weight_sync.threads import SerialThread
from skyrl.errors import DeadlineError, WeightSyncError

logger = logging.getLogger(__name__)

TIMEOUT_KEY = "generator.inference_engine.weight_sync_timeout_s"
_GRACE_S = 5.0
"""Seconds that the announcing call gets to explain why the wire broke."""


@dataclass(frozen=True, kw_only=True)
class BroadcastInitInfo(WeightSyncInitInfo):
    """Where engine workers meet the trainer, and as which rank."""

    master_address: str
    """Address of the store on trainer rank 0."""
    master_port: int
    """Its port, already bound."""
    rank_offset: int = 1
    """Rank of the server's first worker; the trainer is rank 0."""
    world_size: int
    """Trainer rank 0 and all engine workers."""
    timeout_s: float
    """Seconds for the meeting; every transfer has half of it."""
    meeting: Rendezvous | None = field(default=None, repr=False, compare=False)
    """The store itself, on rank 0."""

    def for_servers(self, ws_per_server: int, n_servers: int, dp_size: int = 1) -> list[BroadcastInitInfo]:
        """Each deployment of ``dp_size`` servers gets the next ``ws_per_server`` ranks.

        Its servers share one offset: an engine worker adds its own data-parallel rank.
        """
        return [
            replace(self, rank_offset=self.rank_offset + (server // dp_size) * ws_per_server)
            for server in range(n_servers)
        ]

    def to_api_payload(self) -> dict[str, Any]:
        """See `WeightSyncInitInfo.to_api_payload`."""
        return {
            "master_address": self.master_address,
            "master_port": self.master_port,
            "rank_offset": self.rank_offset,
            "world_size": self.world_size,
            "timeout_s": self.timeout_s,
        }


BuildGroup = Callable[[BroadcastInitInfo], TransferGroup]


class GroupSender(WeightTransferSender):
    """Broadcasts buckets over a group that ``build_group`` joins as rank 0."""

    def __init__(
        self,
        init_info: BroadcastInitInfo | None,
        client: EngineUpdateClient,
        *,
        agreement: RankAgreement,
        build_group: BuildGroup,
        bucket_bytes: int,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        self._init_info, self._client, self._agreement = init_info, client, agreement
        self._build_group, self._bucket_bytes = build_group, bucket_bytes
        self._timeout_s, self._chunk_timeout_s = timeout_s, timeout_s / 2
        self._device = device
        self._group: TransferGroup | None = None
        self._wire: SerialThread | None = None
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._turn = 0
        self._failed = False

    @property
    def is_sender(self) -> bool:
        """Whether this is the rank that talks to the engines."""
        return self._init_info is not None

    @property
    def usable(self) -> bool:
        """See `WeightTransferSender.usable`."""
        return not self._failed and (self._group is not None or not self.is_sender)

    async def open(self) -> None:
        """See `WeightTransferSender.open`; the constructor of the group and the init calls run side by side."""
        info = self._init_info
        if info is None:
            return
        self._wire = SerialThread("weight-wire")
        joined = self._wire.submit(lambda: self._build_group(info))
        told = asyncio.ensure_future(self._client.init_weight_update_communicator(info))
        done, waiting = await asyncio.wait({joined, told}, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        if waiting or any(future.exception() for future in done):
            self._failed = True
            told.cancel()
            joined.cancel()
        _raise_first([told, joined], done)
        if waiting:
            missing = info.meeting.missing_ranks() if info.meeting else []
            raise DeadlineError(
                "trainer rank 0",
                f"{info.world_size - 1} engine workers to join the weight transfer group",
                self._timeout_s,
                TIMEOUT_KEY,
                f"ranks that never came: {missing}; can the servers reach {info.master_address}:{info.master_port}? "
                "SKYRL_WEIGHT_SYNC_HOST sets another address",
            )
        self._group = joined.result()

    async def send_chunks(
        self, chunks: Iterable[WeightChunk], weight_metadata: WeightMetadata | None = None
    ) -> dict[str, float]:
        """See `WeightTransferSender.send_chunks`."""
        if weight_metadata is None:
            raise ValueError("a broadcast needs the metadata of all weights before the first one is sent")
        layouts = plan_buckets(weight_metadata, self._bucket_bytes)
        if not self.is_sender:
            await drain_buckets(pack_buckets(chunks, layouts, None), self._agreement)
            return {}
        report = SendReport()
        try:
            await self._send(chunks, layouts, report)
        except BaseException:
            self._failed = True
            raise
        finally:
            if self._device.type != "cpu":
                self._buffers = [None, None]  # GPU memory is worth more than the time to allocate it again
        return report.to_dict()

    async def _send(self, chunks: Iterable[WeightChunk], layouts: Sequence[BucketLayout], report: SendReport) -> None:
        async def start() -> None:
            began = time.perf_counter()
            await self._client.start_weight_update()
            report.start_s = time.perf_counter() - began

        await send_buckets(self._filled(chunks, layouts), self._agreement, self._transmit, report, start=start)
        began = time.perf_counter()
        await self._client.finish_weight_update()
        report.finish_s = time.perf_counter() - began

    def _filled(self, chunks: Iterable[WeightChunk], layouts: Sequence[BucketLayout]) -> Iterator[Bucket]:
        for layout, buffer in pack_buckets(chunks, layouts, self._take_buffer):
            assert buffer is not None
            yield layout, buffer, checksum_bytes(buffer)  # on a GPU this also waits until the bucket is filled

    def _take_buffer(self, size: int) -> torch.Tensor:
        """One of two buffers in turn: the other one may still be on the wire."""
        self._turn = 1 - self._turn
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[self._turn] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return buffer[:size]

    async def _transmit(self, layout: BucketLayout, buffer: torch.Tensor, checksum: str) -> float:
        """Announce and broadcast one bucket; the moment at which its last byte was sent."""
        group, thread = self._group, self._wire
        if group is None or thread is None:
            raise WeightSyncError("the weight transfer group is not open; call open() first")

        def broadcast() -> float:
            group.broadcast(buffer).wait()
            if buffer.device.type == "cuda":
                torch.cuda.synchronize(buffer.device)
            return time.perf_counter()

        began = time.perf_counter()
        sent = thread.submit(broadcast)
        told = asyncio.ensure_future(self._client.update_named_weights(layout.to_update_info(checksum)))
        done, waiting = await asyncio.wait(
            {sent, told}, timeout=self._chunk_timeout_s, return_when=asyncio.FIRST_EXCEPTION
        )
        if sent in done and sent.exception() is not None and told in waiting:
            await asyncio.wait({told}, timeout=_GRACE_S)
            done |= {told} if told.done() else set()
        told.cancel()
        _raise_first([told, sent], done)
        if waiting:
            raise DeadlineError(
                "trainer rank 0",
                f"bucket {layout.index + 1} of {layout.count} to reach the engines",
                self._chunk_timeout_s,
                TIMEOUT_KEY,
                "each bucket has half of it",
            )
        logger.debug(
            "bucket %d of %d: %d bytes, sent after %.4f s, answered after %.4f s",
            layout.index + 1,
            layout.count,
            layout.size_bytes,
            sent.result() - began,
            time.perf_counter() - began,
        )
        return sent.result()

    def teardown(self) -> None:
        """See `WeightTransferSender.teardown`."""
        group, thread = self._group, self._wire
        self._group = self._wire = None
        self._buffers = [None, None]
        self._failed = True
        if thread is not None:
            # In the thread: a broadcast that was abandoned there must end before its group can be destroyed.
            if group is not None:
                thread.post(group.close)
            thread.close()


def _raise_first(futures: Sequence[asyncio.Future[Any]], done: Iterable[asyncio.Future[Any]]) -> None:
    """Raise the error of the first future that ended with one; mark the errors of the rest as seen."""
    finished = set(done)
    errors = [f.exception() for f in futures if f in finished and not f.cancelled()]
    first = next((error for error in errors if error is not None), None)
    if first is not None:
        raise WeightSyncError(f"the weight transfer failed: {first}") from first
