import asyncio

import pytest

from skyrl.train.generators.cancellation import finish_despite_cancellation


async def test_the_result_and_the_error_of_the_work_pass_through():
    async def fail():
        raise ValueError("x")

    assert await finish_despite_cancellation(asyncio.sleep(0, 3)) == 3
    with pytest.raises(ValueError):
        await finish_despite_cancellation(fail())


async def test_a_cancelled_caller_still_waits_for_the_work():
    done = []

    async def work():
        await asyncio.sleep(0.05)
        done.append(1)

    task = asyncio.create_task(finish_despite_cancellation(work()))
    for _ in range(3):
        await asyncio.sleep(0.005)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [1]
