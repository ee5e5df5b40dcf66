"""What we add to vLLM's HTTP application: an access token on every path, and a count of the engine's queue.

Given to the server as ``--middleware``. vLLM's own ``--api-key`` leaves the control routes (pause, weight update, RPC)
open, so a server that other hosts can reach needs this one.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

ACCESS_TOKEN_VARIABLE = "SKYRL_SERVER_ACCESS_TOKEN"
OPEN_PATHS = frozenset({"/health"})
QUEUE_PATH = "/skyrl/v1/queue"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class SkyRLMiddleware:
    """ASGI middleware.

    * With ``SKYRL_SERVER_ACCESS_TOKEN`` set, a request without ``Authorization: Bearer <token>`` gets 401, but for
      ``/health``.
    * ``GET /skyrl/v1/queue`` answers ``{"unfinished": n}``: requests that the engine holds, running or not. A request
      counts from the moment it is on its way to the engine, in order before any later control call.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._token = os.environ.get(ACCESS_TOKEN_VARIABLE, "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, refuse or pass on one connection."""
        if scope["type"] != "http":
            if scope["type"] == "websocket" and not self._is_allowed(scope):
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
        elif not self._is_allowed(scope):
            await _answer(send, 401, {"error": {"message": "this server needs the run's access token", "code": 401}})
        elif scope["path"] == QUEUE_PATH:
            engine = scope["app"].state.engine_client
            await _answer(send, 200, {"unfinished": engine.output_processor.get_num_unfinished_requests()})
        else:
            await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if not self._token or scope["path"] in OPEN_PATHS:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, f"Bearer {self._token}".encode())


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
