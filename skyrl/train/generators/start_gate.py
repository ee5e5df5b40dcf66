"""Deterministic mode: the engine gets the first call of a whole batch at once.

The engine is paused, every rollout queues its first call with its index as priority, and the engine resumes when
all of them wait. So it forms the same batches in every equal run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Protocol, runtime_checkable

from skyrl.train.generators.cancellation import finish_despite_cancellation


@runtime_checkable
class QueueingClient(Protocol):
    """What the inference client must offer for it."""

    async def pause_generation(self) -> object:
        """Stop the engine from running requests; it still queues them."""
        ...

    async def resume_generation(self) -> object:
        """Let it run again."""
        ...

    async def wait_until_queued(self, count: int, timeout_s: float) -> object:
        """Return when `count` requests wait at the engine; raises when they don't within `timeout_s`."""
        ...


class StartGate:
    """Holds the engine until every rollout of a batch waits in it.

    Args:
        client: Pauses and resumes.
        num_rollouts: Size of the batch.
        timeout_s: Seconds for the calls to queue up.
    """

    def __init__(self, client: QueueingClient, num_rollouts: int, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._on_the_way = num_rollouts
        self._waiting = 0
        self._open = False
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def first_call(self) -> AsyncIterator[None]:
        """Enter around the first model call of a rollout, at its first try and at a repeated one."""
        self._on_the_way -= 1
        self._waiting += 1
        self._changed.set()
        try:
            yield
        finally:
            if not self._open:  # nothing ends while the engine is paused, unless it fails
                self._waiting -= 1
                self._on_the_way += 1
                self._changed.set()

    def gave_up(self) -> None:
        """Tell that a rollout ended without a call that waits."""
        if not self._open:
            self._on_the_way -= 1
            self._changed.set()

    async def run(self) -> None:
        """Pause, wait for the batch, resume. Resumes whatever happens."""
        try:
            await self._client.pause_generation()
            while not await self._all_queued():
                pass
        finally:
            self._open = True
            await finish_despite_cancellation(self._client.resume_generation())

    async def _all_queued(self) -> bool:
        """Wait for one change; return whether every rollout that is left waits at the engine."""
        self._changed.clear()
        if self._on_the_way > 0:
            await self._changed.wait()
            return False
        if self._waiting == 0:
            return True
        queued = asyncio.ensure_future(self._client.wait_until_queued(self._waiting, self._timeout_s))
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({queued, changed}, return_when=asyncio.FIRST_COMPLETED)
            if not queued.done():
                return False
            queued.result()
            return True
        finally:
            for task in (queued, changed):
                if not task.done():
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
