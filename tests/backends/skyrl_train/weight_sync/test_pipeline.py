import asyncio
import threading
import time

import pytest
import torch

from skyrl.backends.skyrl_train.weight_sync.packing import plan_buckets
from skyrl.backends.skyrl_train.weight_sync.pipeline import (
    OtherRankFailed,
    SendReport,
    SingleRank,
    drain_buckets,
    send_buckets,
)
from skyrl.errors import WeightSyncError

LAYOUTS = plan_buckets({"names": list("abcd"), "dtype_names": ["int8"] * 4, "shapes": [[16]] * 4}, 16)


async def ready() -> None:
    """Engines that are ready at once."""


class TwoRanks:
    """Agreement of two ranks that live in threads of one process; a rank left alone breaks the barrier."""

    def __init__(self):
        self._barrier = threading.Barrier(2)
        self._votes = [True, True]

    def rank(self, number):
        return _Rank(self, number)

    def vote(self, number, ok):
        self._votes[number] = ok
        self._barrier.wait(timeout=10)
        agreed = all(self._votes)
        self._barrier.wait(timeout=10)
        return agreed


class _Rank:
    def __init__(self, ranks, number):
        self._ranks, self._number = ranks, number

    def all_ok(self, ok):
        return self._ranks.vote(self._number, ok)


def sender_buckets(fail_at=None):
    for layout in LAYOUTS:
        if layout.index == fail_at:
            raise ValueError("gather failed")
        yield layout, torch.zeros(16, dtype=torch.uint8), "sum"


def other_buckets(fail_at=None):
    for layout in LAYOUTS:
        if layout.index == fail_at:
            raise ValueError("other rank failed")
        yield layout, None


async def run_both(*, sender_fails=None, other_fails=None, wire_fails=None):
    """Run rank 0 and rank 1 to their ends; the outcome of each and the buckets sent."""
    ranks, sent, report = TwoRanks(), [], SendReport()

    async def transmit(layout, buffer, checksum):
        if layout.index == wire_fails:
            raise ConnectionError("wire")
        sent.append(layout.index)
        return time.perf_counter()

    outcomes = await asyncio.gather(
        send_buckets(sender_buckets(sender_fails), ranks.rank(0), transmit, report, start=ready),
        drain_buckets(other_buckets(other_fails), ranks.rank(1)),
        return_exceptions=True,
    )
    return outcomes, sent, report


async def test_buckets_go_out_in_order_on_every_rank():
    outcomes, sent, report = await run_both()
    assert outcomes == [None, None]
    assert sent == [0, 1, 2, 3]
    assert report.bytes == 64


@pytest.mark.parametrize("index", range(4))
async def test_a_broken_wire_stops_the_other_ranks(index):
    (mine, other), sent, _ = await run_both(wire_fails=index)
    assert isinstance(mine, ConnectionError)
    assert isinstance(other, OtherRankFailed)
    assert sent == list(range(index))


@pytest.mark.parametrize("index", range(4))
async def test_a_failed_gather_on_rank_0_stops_the_other_ranks(index):
    (mine, other), _, _ = await run_both(sender_fails=index)
    assert isinstance(mine, ValueError)
    assert isinstance(other, OtherRankFailed)


@pytest.mark.parametrize("index", range(4))
async def test_a_failed_gather_elsewhere_stops_rank_0(index):
    (mine, other), _, _ = await run_both(other_fails=index)
    assert isinstance(mine, OtherRankFailed)
    assert isinstance(other, ValueError)


async def test_a_failure_on_both_ranks_ends_on_both():
    (mine, other), _, _ = await run_both(wire_fails=1, other_fails=2)
    assert isinstance(mine, ConnectionError)
    assert isinstance(other, ValueError)


async def test_the_next_bucket_is_filled_while_one_is_sent():
    filled = []

    def buckets():
        for layout in LAYOUTS:
            filled.append(layout.index)
            yield layout, torch.zeros(16, dtype=torch.uint8), "sum"

    async def transmit(layout, buffer, checksum):
        while len(filled) < min(layout.index + 2, 4):
            await asyncio.sleep(0.001)
        return time.perf_counter()

    await asyncio.wait_for(send_buckets(buckets(), SingleRank(), transmit, SendReport(), start=ready), 10)


async def test_load_time_is_what_comes_after_the_last_byte():
    async def transmit(layout, buffer, checksum):
        end = time.perf_counter()
        await asyncio.sleep(0.05 if layout.is_last else 0)
        return end

    report = SendReport()
    await send_buckets(sender_buckets(), SingleRank(), transmit, report, start=ready)
    assert 0.05 <= report.load_s < 5
    assert report.send_s < report.load_s


async def test_engines_that_do_not_start_stop_the_sender_and_nothing_is_sent():
    async def refuse() -> None:
        raise WeightSyncError("busy")

    async def transmit(layout, buffer, checksum):
        raise AssertionError("nothing may be sent")

    with pytest.raises(WeightSyncError, match="busy"):
        await send_buckets(sender_buckets(), SingleRank(), transmit, SendReport(), start=refuse)
