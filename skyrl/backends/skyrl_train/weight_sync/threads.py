"""Run blocking calls off the event loop, in threads that never keep a process alive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
logger = logging.getLogger(__name__)


class SerialThread:
    """One daemon thread that runs the calls given to it in order.

    A call that never returns (a collective whose peer died) can be abandoned: the thread keeps what the call
    holds alive, and the process may still exit. The thread works on the GPU that is current where it is made.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._cuda_device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Queue a call; the future belongs to the running event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def deliver(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def job() -> None:
            result: T | None = None
            error: BaseException | None = None
            try:
                result = call()
            except StopIteration:
                error = RuntimeError("a call in a thread raised StopIteration")
            except BaseException as caught:  # noqa: BLE001 - handed to whoever awaits the future
                error = caught
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(deliver, result, error)

        self._jobs.put(job)
        return future

    def post(self, call: Callable[[], object]) -> None:
        """Queue a call whose outcome nobody waits for; an error is logged."""

        def job() -> None:
            try:
                call()
            except Exception:
                logger.exception("a call in thread %s failed", self._thread.name)

        self._jobs.put(job)

    def close(self) -> None:
        """Let the thread end after the calls queued so far; waits for nothing."""
        self._jobs.put(None)

    def _work(self) -> None:
        if self._cuda_device is not None:
            torch.cuda.set_device(self._cuda_device)
        while (job := self._jobs.get()) is not None:
            job()
            del job
