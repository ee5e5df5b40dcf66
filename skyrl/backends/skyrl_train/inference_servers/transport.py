"""HTTP under the inference client: sessions per event loop, retries, deadlines, typed errors.

| answer                                     | action                                      |
|--------------------------------------------|---------------------------------------------|
| connection refused, reset or cut           | retry after a pause                         |
| 408, 429, 503 (busy), 5xx without JSON     | retry after a growing pause                 |
| any other status from 400 on               | ``ServerResponseError`` at once             |
| a server that this run started is dead     | ``EngineDiedError`` at once, also in flight |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from skyrl import env_vars
from skyrl.backends.skyrl_train.inference_servers.health import ServerHealth
from skyrl.errors import DeadlineError, EngineDiedError, InferenceError

logger = logging.getLogger(__name__)

BUSY_STATUSES = frozenset({408, 429, 503})
KEEPALIVE_S = 2.0
"""Idle connections are dropped before uvicorn (5 s) drops them, so no request meets a closing one."""
CONNECT_TIMEOUT_S = 10.0
DEATH_NOTICE_S = 6.0
"""A dead engine answers 500 until vLLM's watchdog (every 5 s) ends its server; only then the supervisor knows."""
DEATH_POLL_S = 0.05


class ServerResponseError(InferenceError, aiohttp.ClientResponseError):
    """A server answered with an error status; ``status``, ``message`` and ``url`` say which."""

    def __init__(self, url: str, status: int, message: str, *, retryable: bool = False) -> None:
        Exception.__init__(self, url, status, message, retryable)
        self.url, self.status, self.message, self.retryable = url, status, message, retryable
        self.headers, self.history = None, ()

    def __str__(self) -> str:
        return f"{self.url} answered {self.status}: {self.message}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Callable[..., ServerResponseError], tuple[Any, ...]]:
        return _rebuild_response_error, (self.url, self.status, self.message, self.retryable)


def _rebuild_response_error(url: str, status: int, message: str, retryable: bool) -> ServerResponseError:
    return ServerResponseError(url, status, message, retryable=retryable)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how patiently a request is sent again."""

    attempts: int = 30
    """Sends in all."""
    pause_s: float = 1.0
    """Wait after a lost connection, and the first wait after a busy answer."""
    max_pause_s: float = 8.0
    """Busy answers double the wait up to this."""
    resend: bool = True
    """Whether a request that may have reached the server is sent again; False retries refused connections only."""

    def wait_after(self, attempt: int, error: Exception) -> float | None:
        """Seconds to wait before the next send after ``error`` in send number ``attempt`` (from 0); None gives up."""
        if attempt + 1 >= self.attempts:
            return None
        if isinstance(error, ServerResponseError):
            return min(self.pause_s * 2.0**attempt, self.max_pause_s) if error.retryable else None
        refused = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
        return self.pause_s if refused or self.resend else None


@dataclass(frozen=True, slots=True)
class Reply:
    """A successful answer."""

    status: int
    body: Any
    """Parsed JSON, or the text when it is none, or None when empty."""


async def raise_for_status(response: aiohttp.ClientResponse) -> Reply:
    """Read the whole answer; raise ``ServerResponseError`` for a status from 400 on.

    The message is the JSON body's ``error.message`` (or ``error``, ``detail``, ``message``), else the text, else the
    reason phrase. Busy statuses, and 5xx answers without a JSON body (a router's or proxy's), are ``retryable``.
    """
    raw = await response.read()
    is_json, body = _parse(raw)
    if response.status < 400:
        return Reply(response.status, body)
    message = _error_message(body) if is_json else str(body or "")
    raise ServerResponseError(
        str(response.url),
        response.status,
        message or response.reason or "no reason given",
        retryable=response.status in BUSY_STATUSES or (response.status >= 500 and not is_json),
    )


def _parse(raw: bytes) -> tuple[bool, Any]:
    if not raw:
        return False, None
    try:
        return True, orjson.loads(raw)
    except orjson.JSONDecodeError:
        return False, raw.decode(errors="replace")


def _error_message(body: Any) -> str:
    if isinstance(body, dict):
        inner = body.get("error", body.get("detail", body.get("message", "")))
        return str(inner["message"]) if isinstance(inner, dict) and "message" in inner else str(inner)
    return str(body)


@dataclass
class _LoopState:
    """What belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    session: aiohttp.ClientSession
    slots: asyncio.Semaphore | None
    scopes: set[asyncio.Timeout] = field(default_factory=set)
    unsubscribe: Callable[[], None] = lambda: None

    def expire_all(self) -> None:
        """End every request in flight (from any thread); each then asks ``ServerHealth`` why."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._expire_now)

    def _expire_now(self) -> None:
        for scope in list(self.scopes):
            scope.reschedule(self.loop.time())


class HttpTransport:
    """Sends JSON requests. One session per event loop; sessions of closed loops are dropped at the next use.

    Args:
        max_in_flight: Requests that hold a ``slot`` at the same time, per event loop; 0 means no limit.
        access_token: Sent as bearer token with every request.
        health: Asked before each send; None where the servers are not supervised.
        retry: Default policy.
    """

    def __init__(
        self,
        *,
        max_in_flight: int = 0,
        access_token: str | None = None,
        health: ServerHealth | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._max_in_flight, self._access_token = max_in_flight, access_token
        self._health, self._retry = health, retry or RetryPolicy()
        self._states: dict[int, _LoopState] = {}

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one of the ``max_in_flight`` places."""
        slots = (await self._state()).slots
        if slots is None:
            yield
            return
        async with slots:
            yield

    async def request(
        self,
        method: str,
        url: str,
        *,
        json: Any = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        retry: RetryPolicy | None = None,
        on_retry: Callable[[int], Mapping[str, str]] | None = None,
    ) -> Reply:
        """Send until an answer comes that the table above does not retry.

        Args:
            method: HTTP method.
            url: Full address.
            json: Body; None sends none.
            params: Query; booleans become ``true`` and ``false``, lists repeat the key.
            headers: Further headers.
            retry: Policy of this request.
            on_retry: Called with the number of the next send (from 1); returns headers that replace earlier ones.

        Raises:
            ServerResponseError: An error status that is not (or no longer) retried.
            InferenceError: The connection failed in every send.
            EngineDiedError: A supervised server died.
        """
        policy = retry or self._retry
        data = None if json is None else orjson.dumps(json, option=orjson.OPT_SERIALIZE_NUMPY)
        sent_headers = dict(headers or {})
        if data is not None:
            sent_headers["Content-Type"] = "application/json"
        attempt = 0
        while True:
            try:
                return await self._send_once(method, url, data=data, params=_query(params), headers=sent_headers)
            except (aiohttp.ClientError, ConnectionError) as error:
                self._raise_if_dead(error)
                pause = policy.wait_after(attempt, error)
                if pause is None:
                    await self._await_death_notice(error)
                    raise self._final(error, method, url, attempt + 1) from error
                logger.debug("%s %s failed (%r), send %d follows in %g s", method, url, error, attempt + 2, pause)
            await asyncio.sleep(pause)
            attempt += 1
            if on_retry is not None:
                sent_headers.update(on_retry(attempt))

    async def request_within(self, seconds: float, key: str, method: str, url: str, **options: Any) -> Reply:
        """``request`` with a deadline: raises ``DeadlineError`` naming the config ``key`` when it passes."""
        try:
            async with asyncio.timeout(seconds):
                return await self.request(method, url, **options)
        except TimeoutError as error:
            raise DeadlineError(
                "the inference client", f"{method} {url}", seconds, key, "is the server alive? see its log"
            ) from error

    async def close(self) -> None:
        """Close the sessions of the running loop and of loops that are closed."""
        running = asyncio.get_running_loop()
        for key, state in list(self._states.items()):
            if state.loop is running or state.loop.is_closed():
                del self._states[key]
                state.unsubscribe()
                await state.session.close()

    async def _send_once(self, method: str, url: str, **options: Any) -> Reply:
        state = await self._state()
        if self._health is not None:
            self._health.raise_if_dead()
        # No time limit of its own: the scope is how a server's death reaches a request in flight.
        scope = asyncio.timeout(None)
        try:
            async with scope:
                state.scopes.add(scope)
                try:
                    async with state.session.request(method, url, **options) as response:
                        return await raise_for_status(response)
                finally:
                    state.scopes.discard(scope)
        except TimeoutError as error:
            self._raise_if_dead(error)
            raise

    def _raise_if_dead(self, cause: Exception) -> None:
        if self._health is None:
            return
        try:
            self._health.raise_if_dead()
        except EngineDiedError as dead:
            raise dead from cause

    async def _await_death_notice(self, error: Exception) -> None:
        """Raise ``EngineDiedError`` when ``error`` is the last word of a server that is found dead soon after."""
        refused = isinstance(error, ServerResponseError) and error.status < 500
        if self._health is None or refused:
            return
        deadline = asyncio.get_running_loop().time() + DEATH_NOTICE_S
        while asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(DEATH_POLL_S)
            self._raise_if_dead(error)

    @staticmethod
    def _final(error: Exception, method: str, url: str, sends: int) -> InferenceError:
        if isinstance(error, ServerResponseError):
            return error
        return InferenceError(
            f"{method} {url} failed {sends} time(s), last with {type(error).__name__}: {error}; is the server alive?"
        )

    async def _state(self) -> _LoopState:
        loop = asyncio.get_running_loop()
        state = self._states.get(id(loop))
        if state is not None and state.loop is loop and not state.session.closed:
            return state
        for key, old in list(self._states.items()):
            if old.loop.is_closed() or old.loop is loop:
                self._states.pop(key, None)
                old.unsubscribe()
                await old.session.close()
        state = self._states.get(id(loop)) or self._new_state(loop)
        return state

    def _new_state(self, loop: asyncio.AbstractEventLoop) -> _LoopState:
        connector = aiohttp.TCPConnector(
            limit=env_vars.SKYRL_HTTP_CONNECTION_LIMIT, limit_per_host=0, keepalive_timeout=KEEPALIVE_S
        )
        headers = {"Authorization": f"Bearer {self._access_token}"} if self._access_token else None
        session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            headers=headers,
            trust_env=False,
        )
        slots = asyncio.Semaphore(self._max_in_flight) if self._max_in_flight > 0 else None
        state = _LoopState(loop=loop, session=session, slots=slots)
        if self._health is not None:
            state.unsubscribe = self._health.subscribe(state.expire_all)
        self._states[id(loop)] = state
        return state


def _query(params: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, value in (params or {}).items():
        for item in value if isinstance(value, list | tuple) else [value]:
            pairs.append((name, str(item).lower() if isinstance(item, bool) else str(item)))
    return pairs
