"""Move buckets from producer to wire, so that filling bucket i + 1 overlaps with sending bucket i.

Rank 0 owns the wire. The other ranks only take part in gathering; before every bucket all ranks agree that nobody
has failed, so a failure of rank 0 stops them at the next bucket instead of leaving them in a collective.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from skyrl.backends.skyrl_train.weight_sync.base import RankAgreement
from skyrl.backends.skyrl_train.weight_sync.packing import BucketLayout
from skyrl.backends.skyrl_train.weight_sync.threads import SerialThread
from skyrl.errors import WeightSyncError

logger = logging.getLogger(__name__)

Bucket = tuple[BucketLayout, torch.Tensor, str]
"""Layout, filled buffer and checksum."""
Transmit = Callable[[BucketLayout, torch.Tensor, str], Awaitable[float]]


@dataclass(kw_only=True)
class SendReport:
    """Seconds and bytes of one transfer, as rank 0 saw them."""

    start_s: float = 0.0
    """Telling the engines that an update begins."""
    gather_s: float = 0.0
    """Gathering, casting and packing; overlaps with ``send_s`` but for the first bucket."""
    send_s: float = 0.0
    """First byte asked for to last byte on the wire."""
    load_s: float = 0.0
    """Last byte on the wire to the last bucket loaded; earlier buckets load while later ones travel."""
    finish_s: float = 0.0
    """Telling the engines that the update ends."""
    bytes: float = 0.0
    """Bytes of all buckets."""

    def to_dict(self) -> dict[str, float]:
        """The measurements by field name."""
        return dict(vars(self))


class OtherRankFailed(WeightSyncError):
    """A transfer ended because another trainer rank failed."""

    def __init__(self) -> None:
        super().__init__("another trainer rank failed during the weight transfer; its own error says why")


class SingleRank:
    """Agreement of a trainer with one rank."""

    def all_ok(self, ok: bool) -> bool:
        """See `RankAgreement.all_ok`."""
        return ok

    def gather_text(self, text: str) -> list[str]:
        """See `RankAgreement.gather_text`."""
        return [text]


class GroupAgreement:
    """Agreement over a gloo group of the trainer's ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_ok(self, ok: bool) -> bool:
        """See `RankAgreement.all_ok`."""
        flag = torch.tensor([int(ok)])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._group)
        return bool(flag.item())

    def gather_text(self, text: str) -> list[str]:
        """See `RankAgreement.gather_text`."""
        data = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)
        world = dist.get_world_size(self._group)
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(world)]
        dist.all_gather(sizes, torch.tensor([len(text.encode())]), group=self._group)
        longest = max(1, *(int(size.item()) for size in sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world)]
        dist.all_gather(texts, padded, group=self._group)
        return [bytes(row[: int(size.item())].tolist()).decode() for row, size in zip(texts, sizes, strict=True)]


class _Producer:
    """Steps the bucket iterator in a thread of its own, asking all ranks before each step."""

    def __init__(self, buckets: Iterator[Bucket], agreement: RankAgreement) -> None:
        self._buckets, self._agreement = buckets, agreement
        self._thread = SerialThread("weight-gather")
        self.busy_s = 0.0

    def next(self) -> asyncio.Future[Bucket | None]:
        """The next bucket, or None at the end; raises what gathering raised, or that another rank failed."""
        return self._thread.submit(self._step)

    def settle(self, ok: bool) -> asyncio.Future[bool]:
        """Tell the other ranks how it ended, and hear the same from them."""
        return self._thread.submit(lambda: self._agreement.all_ok(ok))

    def close(self) -> None:
        self._thread.close()

    def _step(self) -> Bucket | None:
        if not self._agreement.all_ok(True):
            raise OtherRankFailed
        began = time.perf_counter()
        bucket = next(self._buckets, None)
        self.busy_s += time.perf_counter() - began
        return bucket


async def send_buckets(
    buckets: Iterator[Bucket],
    agreement: RankAgreement,
    transmit: Transmit,
    report: SendReport,
    *,
    start: Callable[[], Awaitable[None]],
) -> None:
    """Rank 0: transmit every bucket in order while the next one is being filled.

    ``start`` makes the engines ready while the first bucket is filled. ``transmit`` returns the moment
    (`time.perf_counter`) at which the last byte was on the wire. An error of either, or of the producer, is told to
    the other ranks and raised. Adds to ``report``: gather_s, send_s, load_s, bytes.
    """
    producer = _Producer(buckets, agreement)
    pending = producer.next()
    agreed = False  # whether the other ranks already know the outcome
    try:
        await start()
        bucket = await pending
        began = wire_end = time.perf_counter()
        while bucket is not None:
            pending = producer.next()
            layout, buffer, checksum = bucket
            wire_end = await transmit(layout, buffer, checksum)
            report.bytes += layout.size_bytes
            bucket = await pending
        ended = time.perf_counter()
        agreed = True
        if not await producer.settle(True):
            raise OtherRankFailed
        report.gather_s += producer.busy_s
        report.send_s += wire_end - began
        report.load_s += ended - wire_end
    except BaseException:
        if not agreed:
            await _withdraw(producer, pending)
        raise
    finally:
        producer.close()


async def _withdraw(producer: _Producer, pending: asyncio.Future[Bucket | None]) -> None:
    """Let the step in progress end, then tell the other ranks that this one failed."""
    outcome = (await asyncio.gather(pending, return_exceptions=True))[0]
    if not isinstance(outcome, OtherRankFailed):
        await producer.settle(False)
    logger.warning("weight transfer abandoned; the other trainer ranks were told")


async def drain_buckets(buckets: Iterator[tuple[BucketLayout, torch.Tensor | None]], agreement: RankAgreement) -> None:
    """Ranks other than 0: take part in gathering until rank 0 is done, or stop with it.

    Raises:
        OtherRankFailed: rank 0 or a third rank failed.
    """
    thread = SerialThread("weight-gather")

    def drain() -> None:
        error: BaseException | None = None
        while agreement.all_ok(error is None):
            try:
                if next(buckets, None) is None:
                    break
            except Exception as caught:  # noqa: BLE001 - raised below, after the others were told
                error = caught
        else:
            raise error or OtherRankFailed
        if not agreement.all_ok(True):
            raise OtherRankFailed

    try:
        await thread.submit(drain)
    finally:
        thread.close()
