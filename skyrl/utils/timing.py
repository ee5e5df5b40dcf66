"""Seconds of named phases, summed into a plain dict."""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping
from types import TracebackType
from typing import Self

logger = logging.getLogger(__name__)


class Timer:
    """Add the seconds that a block takes to ``timings[name]``; use with ``with`` or ``async with``.

    A phase that runs several times in a step accumulates; a block that raises is counted too.

    Example:
        ``with Timer("generate", all_timings): ...`` leaves ``{"generate": 12.3}``.
    """

    def __init__(self, name: str, timings: MutableMapping[str, float] | None = None) -> None:
        self.name = name
        self.timings = timings
        self.elapsed_s = 0.0
        self._start_s = 0.0

    def __enter__(self) -> Self:
        logger.debug("Started: %s", self.name)
        self._start_s = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.elapsed_s = time.perf_counter() - self._start_s
        if self.timings is not None:
            self.timings[self.name] = self.timings.get(self.name, 0.0) + self.elapsed_s
        logger.debug("Finished: %s after %.3f s", self.name, self.elapsed_s)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)
