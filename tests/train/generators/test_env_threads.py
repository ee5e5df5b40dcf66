import asyncio
import threading
import time

import pytest

from skyrl.train.generators.env_threads import EnvThreadPool, start_signal, wait_for_job


def test_a_pool_needs_a_thread():
    with pytest.raises(ValueError, match="max_workers=0"):
        EnvThreadPool(0)


def test_jobs_run_at_the_same_time_up_to_the_limit():
    pool, lock, running, seen = EnvThreadPool(3), threading.Lock(), [], []

    def job():
        with lock:
            running.append(1)
            seen.append(len(running))
        time.sleep(0.01)
        with lock:
            running.pop()

    jobs = [pool.submit(job) for _ in range(12)]
    for one in jobs:
        one.future.result(timeout=5)
    assert max(seen) == 3
    pool.shutdown()


def test_an_abandoned_job_gives_its_place_to_another_thread():
    pool, release = EnvThreadPool(1), threading.Event()
    stuck = pool.submit(release.wait)
    time.sleep(0.02)
    waiting = pool.submit(lambda: "ran")
    pool.abandon(stuck)
    assert waiting.future.result(timeout=5) == "ran"
    release.set()
    assert stuck.future.result(timeout=5) is True
    again = [pool.submit(lambda: 1) for _ in range(3)]
    assert [one.future.result(timeout=5) for one in again] == [1, 1, 1]


def test_an_abandoned_job_that_has_not_begun_never_runs():
    pool, release, ran = EnvThreadPool(1), threading.Event(), []
    pool.submit(release.wait)
    time.sleep(0.02)
    waiting = pool.submit(lambda: ran.append(1))
    pool.abandon(waiting)
    release.set()
    pool.submit(lambda: None).future.result(timeout=5)
    assert ran == [] and waiting.future.cancelled()


async def test_the_clock_starts_when_the_job_does():
    pool = EnvThreadPool(1)
    pool.submit(lambda: time.sleep(0.2))
    started, set_started = start_signal()
    job = pool.submit(lambda: "late", on_start=set_started)
    assert await wait_for_job(job, started, timeout_s=0.1)
    assert job.future.result() == "late"


async def test_a_job_that_runs_too_long_is_reported():
    pool, release = EnvThreadPool(1), threading.Event()
    started, set_started = start_signal()
    job = pool.submit(release.wait, on_start=set_started)
    assert not await wait_for_job(job, started, timeout_s=0.05)
    assert not await wait_for_job(job, None, timeout_s=0.01)
    release.set()


async def test_errors_stay_with_the_job():
    def fail():
        raise KeyError("x")

    job = EnvThreadPool(1).submit(fail)
    assert await wait_for_job(job, None, timeout_s=1)
    with pytest.raises(KeyError):
        job.future.result()


async def test_a_cancelled_wait_skips_a_job_that_has_not_begun():
    pool, release, ran = EnvThreadPool(1), threading.Event(), []
    pool.submit(release.wait)
    started, set_started = start_signal()
    job = pool.submit(lambda: ran.append(1), on_start=set_started)
    waiting = asyncio.create_task(wait_for_job(job, started, timeout_s=5))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
    pool.submit(lambda: None).future.result(timeout=5)
    assert ran == []


def test_a_job_that_outlives_its_loop_ends_quietly():
    pool, release = EnvThreadPool(1), threading.Event()
    jobs = []

    async def start():
        pool.submit(release.wait)
        started, set_started = start_signal()
        jobs.append(pool.submit(lambda: "late", on_start=set_started))
        started.cancel()

    asyncio.run(start())
    release.set()
    assert jobs[0].future.result(timeout=5) == "late"
