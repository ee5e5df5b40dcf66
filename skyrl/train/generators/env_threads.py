"""Threads for environment code.

Unlike `concurrent.futures.ThreadPoolExecutor`, a call that never returns costs its own thread only: the pool starts
another one in its place, and the process can still exit.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class EnvJob:
    """One call, waiting or running."""

    function: Callable[[], Any]
    """What to run."""
    future: Future[Any] = field(default_factory=Future)
    """Its result; never cancelled once it runs."""
    on_start: Callable[[], None] = lambda: None
    """Called in the thread when the call begins."""


class EnvThreadPool:
    """Daemon threads, started when needed.

    Args:
        max_workers: Calls that run at one time.
    """

    def __init__(self, max_workers: int) -> None:
        if max_workers < 1:
            raise ValueError(f"max_workers={max_workers} must be at least 1")
        self._jobs: queue.SimpleQueue[EnvJob | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._capacity = max_workers
        self._threads = 0
        self._idle = 0
        self._abandoned: set[EnvJob] = set()

    def submit(self, function: Callable[[], Any], on_start: Callable[[], None] = lambda: None) -> EnvJob:
        """Queue a call."""
        job = EnvJob(function, on_start=on_start)
        with self._lock:
            self._jobs.put(job)
            self._grow()
        return job

    def abandon(self, job: EnvJob) -> None:
        """Give up on a call: skip it if it has not begun, else let another thread take the place of its own."""
        if job.future.cancel():
            return
        with self._lock:
            if job.future.done():
                return
            self._abandoned.add(job)
            self._threads -= 1
            self._grow()

    def shutdown(self) -> None:
        """End idle threads, and busy ones after their call."""
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)

    def _grow(self) -> None:
        if self._threads < self._capacity and self._jobs.qsize() > self._idle:
            self._threads += 1
            threading.Thread(target=self._work, name="skyrl-env", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            job = self._jobs.get()
            with self._lock:
                self._idle -= 1
                if job is None:
                    self._threads -= 1
                    return
            _run(job)
            with self._lock:
                if job in self._abandoned:
                    self._abandoned.remove(job)
                    return


def _run(job: EnvJob) -> None:
    if not job.future.set_running_or_notify_cancel():
        return
    job.on_start()
    try:
        result = job.function()
    except BaseException as error:  # noqa: BLE001 - the future carries it to the caller
        job.future.set_exception(error)
    else:
        job.future.set_result(result)


def start_signal() -> tuple[asyncio.Future[None], Callable[[], None]]:
    """Return a future of the running loop and what sets it, from any thread; the latter is for `on_start`."""
    loop = asyncio.get_running_loop()
    started: asyncio.Future[None] = loop.create_future()

    def resolve() -> None:
        if not started.done():
            started.set_result(None)

    def set_from_thread() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(resolve)

    return started, set_from_thread


async def wait_for_job(job: EnvJob, started: asyncio.Future[None] | None, timeout_s: float) -> bool:
    """Wait for a call.

    Args:
        job: The call.
        started: From `start_signal`; the clock runs from then on, not while the call queues. None starts it now.
        timeout_s: Seconds that it may run.

    Returns:
        Whether it ended in time.
    """
    ended = asyncio.wrap_future(job.future)
    try:
        if started is not None:
            await asyncio.wait({ended, started}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            await asyncio.wait({ended}, timeout=timeout_s)
        if ended.done() and not ended.cancelled():
            ended.exception()  # marks it as seen; the caller reads it from the job
        return ended.done()
    finally:
        if started is not None:
            started.cancel()
        if not ended.done():
            ended.cancel()
