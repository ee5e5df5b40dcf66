"""Limits on how fast and how many trajectories start: a token bucket, then a semaphore."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self


@dataclass
class RateLimiterConfig:
    """Limits of a generator whose environments or services must not be overrun."""

    enabled: bool = False
    """False lets everything through."""
    trajectories_per_second: float | None = None
    """Starts per second, > 0; bursts of up to one second's worth pass at once. None is no limit."""
    max_concurrency: int | None = None
    """Trajectories at one time, >= 1. None is no limit."""

    def __post_init__(self) -> None:
        rate, slots = self.trajectories_per_second, self.max_concurrency
        if rate is not None and not rate > 0:
            raise ValueError(f"trajectories_per_second={rate} must be > 0; use null for no limit")
        if slots is not None and slots < 1:
            raise ValueError(f"max_concurrency={slots} must be >= 1; use null for no limit")


class NoOpRateLimiter:
    """Limits nothing."""

    async def acquire(self) -> None:
        """Return at once."""

    def release(self) -> None:
        """Do nothing."""

    async def __aenter__(self) -> Self:
        await self.acquire()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class AsyncRateLimiter(NoOpRateLimiter):
    """Waits in ``acquire`` for a token of the bucket and then for a free slot; ``release`` frees the slot only.

    The bucket starts full and holds ``max(1, rate)`` tokens. One object may serve several event loops, one after the
    other: the slots belong to the loop that took them.
    """

    def __init__(self, rate: float | None = None, max_concurrency: int | None = None) -> None:
        self.rate = rate
        self.max_concurrency = max_concurrency
        self._capacity = max(1.0, rate or 0.0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots: asyncio.Semaphore | None = None
        self._tokens = self._capacity
        self._filled_s = 0.0

    async def acquire(self) -> None:
        """Wait until one more trajectory may start."""
        self._bind()
        await self._take_token()
        if self._slots is not None:
            await self._slots.acquire()

    def release(self) -> None:
        """A trajectory has ended."""
        if self._slots is not None:
            self._slots.release()

    def _bind(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        self._loop = loop
        self._slots = None if self.max_concurrency is None else asyncio.Semaphore(self.max_concurrency)
        self._tokens, self._filled_s = self._capacity, loop.time()

    async def _take_token(self) -> None:
        """Take a token; below zero it is borrowed and waited for, so that waiters keep their order."""
        if self.rate is None:
            return
        now = asyncio.get_running_loop().time()
        self._tokens = min(self._capacity, self._tokens + (now - self._filled_s) * self.rate)
        self._filled_s = now
        self._tokens -= 1.0
        if self._tokens < 0:
            try:
                await asyncio.sleep(-self._tokens / self.rate)
            except asyncio.CancelledError:
                self._tokens += 1.0
                raise


def create_rate_limiter(config: RateLimiterConfig | Mapping[str, Any] | None) -> NoOpRateLimiter:
    """Limiter for a config, or for the mapping of its fields; one that limits nothing if none is set.

    Raises:
        TypeError: The mapping has an unknown key.
        ValueError: A limit is out of range.
    """
    if config is None:
        return NoOpRateLimiter()
    limits = config if isinstance(config, RateLimiterConfig) else RateLimiterConfig(**config)
    if not limits.enabled or (limits.trajectories_per_second is None and limits.max_concurrency is None):
        return NoOpRateLimiter()
    return AsyncRateLimiter(limits.trajectories_per_second, limits.max_concurrency)
