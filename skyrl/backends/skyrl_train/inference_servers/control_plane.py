"""Calls that go to every server at once, never through the router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.backends.skyrl_train.inference_servers.base import PauseMode
from skyrl.backends.skyrl_train.inference_servers.transport import HttpTransport, Reply, RetryPolicy
from skyrl.backends.skyrl_train.inference_servers.vllm_middleware import QUEUE_PATH
from skyrl.errors import DeadlineError, InferenceError, WeightSyncError

logger = logging.getLogger(__name__)

TIMEOUT_KEY = "generator.inference_engine.control_timeout_s"

ONCE = RetryPolicy(attempts=5, resend=False)
"""A control call may have taken effect when its connection breaks; only refused connections are tried again."""

FRESH = {"Connection": "close"}
"""A connection per call: the server closes a kept one after an error, and a call that then breaks is not sent again."""

QUEUE_POLL_S = 0.01
ABORT_TIMEOUT_S = 5.0


class FanOutError(InferenceError):
    """A call failed on some servers; ``failures`` maps each of their URLs to its error."""

    def __init__(self, path: str, failures: Mapping[str, Exception], num_servers: int) -> None:
        self.path, self.failures, self.num_servers = path, dict(failures), num_servers
        lines = "; ".join(f"{url}: {error}" for url, error in self.failures.items())
        super().__init__(f"{path} failed on {len(self.failures)} of {num_servers} inference server(s): {lines}")

    def __reduce__(self) -> tuple[type[FanOutError], tuple[str, dict[str, Exception], int]]:
        return type(self), (self.path, self.failures, self.num_servers)


class ControlPlane:
    """Fan-out to ``server_urls``. Every call waits for all servers, then raises naming each one that failed."""

    def __init__(self, transport: HttpTransport, server_urls: Sequence[str], timeout_s: float) -> None:
        self._transport, self._urls, self._timeout_s = transport, list(server_urls), timeout_s

    async def call(
        self,
        path: str,
        *,
        method: str = "POST",
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        json_by_url: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Send one call to every server at once.

        Args:
            path: Path with its leading slash.
            method: HTTP method.
            params: Query, the same for all.
            json: Body, the same for all.
            json_by_url: Body of each server; replaces ``json``.
            timeout_s: Deadline of each server's answer; None takes ``control_timeout_s``.

        Returns:
            ``{url: {"status": int, "body": parsed JSON, text or None}}``.

        Raises:
            DeadlineError: Every server that failed did so by not answering in time.
            FanOutError: Otherwise, when at least one failed.
        """
        replies, failures = await self._gather(
            path, method=method, params=params, json=json, json_by_url=json_by_url, timeout_s=timeout_s
        )
        if failures:
            raise _fan_out_error(path, failures, len(self._urls))
        return {url: {"status": reply.status, "body": reply.body} for url, reply in replies.items()}

    async def pause(self, mode: PauseMode, clear_cache: bool) -> dict[str, dict[str, Any]]:
        """Pause every server; when one fails, the others are resumed before the error is raised."""
        params = {"mode": mode.value, "clear_cache": clear_cache}
        replies, failures = await self._gather("/pause", params=params)
        if failures:
            await self._undo_pause(list(replies))
            raise _fan_out_error("/pause", failures, len(self._urls))
        return {url: {"status": reply.status, "body": reply.body} for url, reply in replies.items()}

    async def reset_prefix_cache(self, reset_running_requests: bool) -> dict[str, dict[str, Any]]:
        """Forget cached prefixes. ``{"success": false}`` counts as a failure of that server."""
        path = "/reset_prefix_cache"
        answers = await self.call(path, params={"reset_running_requests": reset_running_requests})
        refused: dict[str, Exception] = {
            url: InferenceError("the cache could not be reset; blocks are still in use")
            for url, answer in answers.items()
            if isinstance(answer["body"], dict) and answer["body"].get("success") is False
        }
        if refused:
            raise FanOutError(path, refused, len(self._urls))
        return answers

    async def require_paused(self) -> None:
        """Raise ``WeightSyncError`` unless every server is paused: generating during an update kills an engine."""
        answers = await self.call("/is_paused", method="GET")
        running = [url for url, answer in answers.items() if not answer["body"]["is_paused"]]
        if running:
            raise WeightSyncError(f"weights may only change while generation is paused; {', '.join(running)} generate")

    async def collective_rpc(
        self, method: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, timeout_s: float | None
    ) -> dict[str, list[Any]]:
        """Call a method of every engine worker; one list of results per server."""
        body: dict[str, Any] = {"method": method, "args": list(args or []), "kwargs": dict(kwargs or {})}
        if timeout_s is not None:
            body["timeout"] = timeout_s
        answers = await self.call("/collective_rpc", json=body, timeout_s=timeout_s)
        return {url: (answer["body"] or {}).get("results", []) for url, answer in answers.items()}

    async def world_size_per_server(self) -> int:
        """Workers that each server reports; raises ``InferenceError`` when servers differ."""
        answers = await self.call("/get_world_size", method="GET")
        sizes = {url: int(answer["body"]["world_size"]) for url, answer in answers.items()}
        if len(set(sizes.values())) != 1:
            raise InferenceError(f"inference servers differ in world size: {sizes}; give all the same parallelism")
        return next(iter(sizes.values()))

    async def wait_until_queued(self, count: int, timeout_s: float) -> int:
        """Poll until the engines together hold ``count`` unfinished requests; the number that they hold."""
        held = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    answers = await self.call(QUEUE_PATH, method="GET")
                    held = sum(int(answer["body"]["unfinished"]) for answer in answers.values())
                    if held >= count:
                        return held
                    await asyncio.sleep(QUEUE_POLL_S)
        except TimeoutError as error:
            raise DeadlineError(
                "the inference client",
                f"{count} queued requests, {held} have come",
                timeout_s,
                "timeout_s",
                "was a request refused? only servers started by this library count their queue",
            ) from error

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Tell every server to drop requests that nobody waits for any more. Best effort: failures are logged."""
        _, failures = await self._gather(
            "/abort_requests", json={"request_ids": list(request_ids)}, timeout_s=ABORT_TIMEOUT_S
        )
        for url, error in failures.items():
            logger.debug("could not abort %s at %s: %s", request_ids, url, error)

    async def _undo_pause(self, urls: Sequence[str]) -> None:
        _, failures = await self._gather("/resume", urls=urls)
        for url, error in failures.items():
            logger.error("%s was paused and could not be resumed: %s", url, error)

    async def _gather(
        self,
        path: str,
        *,
        urls: Sequence[str] | None = None,
        method: str = "POST",
        json_by_url: Mapping[str, Any] | None = None,
        json: Any = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> tuple[dict[str, Reply], dict[str, Exception]]:
        targets = self._urls if urls is None else list(urls)

        async def one(url: str) -> Reply:
            body = json if json_by_url is None else json_by_url[url]
            seconds = self._timeout_s if timeout_s is None else timeout_s
            return await self._transport.request_within(
                seconds, TIMEOUT_KEY, method, f"{url}{path}", json=body, headers=FRESH, retry=ONCE, **options
            )

        results = await asyncio.gather(*(one(url) for url in targets), return_exceptions=True)
        replies: dict[str, Reply] = {}
        failures: dict[str, Exception] = {}
        for url, result in zip(targets, results, strict=True):
            if isinstance(result, Reply):
                replies[url] = result
            elif isinstance(result, Exception):
                failures[url] = result
            else:
                raise result
        return replies, failures


def _fan_out_error(path: str, failures: dict[str, Exception], num_servers: int) -> InferenceError | DeadlineError:
    first = next(iter(failures.values()))
    if all(isinstance(error, DeadlineError) for error in failures.values()):
        assert isinstance(first, DeadlineError)
        urls = ", ".join(failures)
        return DeadlineError(first.waiter, f"{path} at {urls}", first.seconds, first.key, first.hint)
    error = FanOutError(path, failures, num_servers)
    error.__cause__ = first
    return error
