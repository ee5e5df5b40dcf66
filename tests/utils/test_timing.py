"""Timers add up, count failures and nest in async code."""

import asyncio
import time

import pytest

from skyrl.utils.timing import Timer


def test_one_name_accumulates_over_blocks():
    timings = {"other": 5.0}
    for _ in range(2):
        with Timer("generate", timings):
            time.sleep(0.01)
    assert 0.02 <= timings["generate"] < 1.0
    assert timings["other"] == 5.0


def test_a_block_that_raises_is_counted_and_its_error_propagates():
    timings = {}
    with pytest.raises(KeyError), Timer("sync_weights", timings):
        raise KeyError("x")
    assert timings["sync_weights"] >= 0.0


def test_an_async_block_counts_the_time_it_waits():
    timings = {}

    async def wait():
        async with Timer("eval", timings) as timer:
            await asyncio.sleep(0.02)
        return timer.elapsed_s

    elapsed = asyncio.run(wait())
    assert timings["eval"] == elapsed >= 0.02


def test_without_a_dict_the_timer_still_measures():
    with Timer("step") as timer:
        time.sleep(0.005)
    assert timer.elapsed_s >= 0.005
