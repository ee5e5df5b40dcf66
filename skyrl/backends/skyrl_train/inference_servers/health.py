"""Which servers answer, which of those that this run started are dead, and who must know."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

from skyrl.errors import EngineDiedError

START_TIMEOUT_KEY = "SKYRL_WAIT_UNTIL_INFERENCE_SERVER_HEALTHY_TIMEOUT_S"
"""Bounds the wait until a server that starts is healthy."""


def answers_health(url: str, timeout_s: float = 5.0) -> bool:
    """Whether ``GET /health`` of the server or router at ``url`` answers 200; each socket wait ends after the time."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class ServerHealth:
    """Thread-safe record of dead servers. A supervisor writes it, the client asks it before every request.

    The first death ends every request in flight (``subscribe``): behind a router nobody knows which server a request
    went to, and weight sync needs every server anyway.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dead: dict[str, str] = {}
        self._listeners: dict[int, Callable[[], None]] = {}
        self._next_listener = 0

    def mark_dead(self, url: str, reason: str) -> None:
        """Record that the server at ``url`` is gone; the first reason stays."""
        with self._lock:
            if url in self._dead:
                return
            self._dead[url] = reason
            listeners = list(self._listeners.values())
        for listener in listeners:
            listener()

    def raise_if_dead(self) -> None:
        """Raise ``EngineDiedError`` with every dead server and its reason, if there is one."""
        with self._lock:
            dead = dict(self._dead)
        if dead:
            reasons = "; ".join(f"{url}: {reason}" for url, reason in dead.items())
            raise EngineDiedError(f"{len(dead)} inference server(s) died: {reasons}")

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` (from any thread) at each death; returns the function that ends this."""
        with self._lock:
            key = self._next_listener
            self._next_listener += 1
            self._listeners[key] = listener

        def unsubscribe() -> None:
            with self._lock:
                self._listeners.pop(key, None)

        return unsubscribe
