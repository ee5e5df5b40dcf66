"""A stand-in for a vLLM server: answers the routes that the client uses, records them, fails on demand."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    """One request that arrived."""

    path: str
    query: dict[str, list[str]]
    headers: CIMultiDict[str]
    body: Any


@dataclass
class FakeVLLMServer:
    """Answers like vLLM 0.26. Token i of a response is the prompt's last token + 1 + i, its log-prob ``-(i + 1)``."""

    world_size: int = 1
    paused: bool = False
    default_tokens: int = 3
    delay_s: float = 0.0
    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    scripted: dict[str, deque[Answer]] = field(default_factory=lambda: defaultdict(deque))
    in_flight: int = 0
    most_in_flight: int = 0

    def requests(self, path: str) -> list[Seen]:
        """What arrived at ``path``, in order."""
        return [one for one in self.seen if one.path == path]

    def script(self, path: str, *answers: Answer) -> None:
        """Answer the next requests to ``path`` with these, then normally again."""
        self.scripted[path].extend(answers)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeVLLMServer]:
        """Listen on a free loopback port."""
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        query = {key: request.query.getall(key) for key in request.query}
        self.seen.append(Seen(request.path, query, request.headers.copy(), body))
        if self.scripted[request.path]:
            return await self.scripted[request.path].popleft()(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.delay_s)
            return self._answer(request.path, body)
        finally:
            self.in_flight -= 1

    def _answer(self, path: str, body: Any) -> web.StreamResponse:
        if path == "/inference/v1/generate":
            return web.json_response(
                generate_body(body, body["sampling_params"].get("max_tokens", self.default_tokens))
            )
        if path in {"/pause", "/resume"}:
            self.paused = path == "/pause"
            return web.json_response({"status": "paused" if self.paused else "resumed"})
        answers = {
            "/is_paused": {"is_paused": self.paused},
            "/get_world_size": {"world_size": self.world_size},
            "/reset_prefix_cache": {"success": True},
            "/collective_rpc": {"results": [{"rank": 0}]},
            "/skyrl/v1/queue": {"unfinished": 2},
            "/tokenize": {"tokens": [1, 2], "count": 2, "max_model_len": 64},
            "/detokenize": {"prompt": "text"},
        }
        return web.json_response(answers.get(path, {"path": path, "body": body}))


def generate_body(request: dict[str, Any], count: int, finish_reason: str = "length") -> dict[str, Any]:
    """What vLLM answers to a token request that produced ``count`` tokens."""
    first = request["token_ids"][-1] + 1
    tokens = list(range(first, first + count))
    content = [{"token": f"token_id:{token}", "logprob": -float(i + 1)} for i, token in enumerate(tokens)]
    with_logprobs = request["sampling_params"].get("logprobs") is not None
    return {
        "request_id": "generate-tokens-x",
        "choices": [
            {
                "index": 0,
                "token_ids": tokens,
                "finish_reason": finish_reason,
                "logprobs": {"content": content} if with_logprobs else None,
            }
        ],
    }


def status(code: int, text: str = "", json: Any = None) -> Answer:
    """Answer with this status and body."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(json, status=code) if json is not None else web.Response(status=code, text=text)

    return answer


async def drop(request: web.Request) -> web.StreamResponse:
    """Cut the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def aborted_after(count: int) -> Answer:
    """A generation that the engine aborted after ``count`` tokens."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(generate_body(await request.json(), count, "abort"))

    return answer


def hang(seconds: float = 60.0) -> Answer:
    """No answer for a long time."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return web.Response()

    return answer
