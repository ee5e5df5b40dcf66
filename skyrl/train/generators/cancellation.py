"""Clean-up that a cancellation can't cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def finish_despite_cancellation(work: Awaitable[T]) -> T:
    """Await `work` to its end even if the caller is cancelled meanwhile; then pass the cancellation on.

    For clean-up whose own duration is bounded.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except BaseException:  # noqa: BLE001 - raised below, from the task
            break
    if cancelled is not None:
        raise cancelled
    return task.result()
