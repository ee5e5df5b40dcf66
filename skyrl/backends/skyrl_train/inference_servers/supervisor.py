"""Notices dead servers: at once when the actor or the engine ends, within half a minute when it stops to answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import ray

from skyrl.backends.skyrl_train.inference_servers.health import ServerHealth, answers_health

logger = logging.getLogger(__name__)

WATCH_POLL_S = 0.5
HEALTH_INTERVAL_S = 10.0
MAX_MISSES = 3
JOIN_TIMEOUT_S = 2.0
"""A thread that hangs in a health request ends by itself when the request does, and records nothing more."""


class ServerSupervisor:
    """Watches servers from a thread of its own and records deaths in a ``ServerHealth``.

    Args:
        watches: For each server's URL, the reference of its actor's pending ``watch`` call.
        health: Where deaths are recorded.
        interval_s: Seconds between two ``/health`` requests to a server, and the time one may take.
        max_misses: Unanswered ones in a row after which a server counts as dead.
    """

    def __init__(
        self,
        watches: Mapping[str, Any],
        health: ServerHealth,
        *,
        interval_s: float = HEALTH_INTERVAL_S,
        max_misses: int = MAX_MISSES,
    ) -> None:
        self._watches = {ref: url for url, ref in watches.items()}
        self._health, self._interval_s, self._max_misses = health, interval_s, max_misses
        self._misses = dict.fromkeys(watches, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server-supervisor", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the watch, in bounded time; call it before the servers are stopped."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        next_poll = time.monotonic() + self._interval_s
        while self._watches and not self._stop.is_set():
            if not ray.is_initialized():
                return
            done, _ = ray.wait(list(self._watches), num_returns=1, timeout=WATCH_POLL_S)
            for ref in done:
                self._record_end(ref)
            if time.monotonic() >= next_poll:
                for url in list(self._watches.values()):
                    if self._stop.is_set():
                        return
                    self._poll(url)
                next_poll = time.monotonic() + self._interval_s

    def _record_end(self, ref: Any) -> None:
        url = self._watches.pop(ref)
        try:
            ray.get(ref)
            reason = "its server was stopped"
        except ray.exceptions.RayTaskError as error:
            reason = str(error.cause)
        except ray.exceptions.RayError as error:
            reason = f"its process ended: {str(error).strip().splitlines()[0]}"
        if not self._stop.is_set():
            self._mark(url, reason)

    def _poll(self, url: str) -> None:
        if answers_health(url, self._interval_s):
            self._misses[url] = 0
            return
        self._misses[url] += 1
        if self._misses[url] >= self._max_misses and not self._stop.is_set():
            self._watches = {ref: other for ref, other in self._watches.items() if other != url}
            self._mark(url, f"{self._max_misses} health checks of {self._interval_s:g} s went unanswered")

    def _mark(self, url: str, reason: str) -> None:
        logger.error("Inference server %s died: %s", url, reason)
        self._health.mark_dead(url, reason)
