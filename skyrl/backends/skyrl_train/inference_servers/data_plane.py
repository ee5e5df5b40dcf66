"""Calls that one server answers, reached through the router when there is one."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.backends.skyrl_train.inference_servers.control_plane import ControlPlane
from skyrl.backends.skyrl_train.inference_servers.generation import (
    ENGINE_REQUEST_PREFIX,
    GENERATE_PATH,
    Generation,
    GenerationRequest,
    continue_after_abort,
    failed,
    join,
    parse_generation,
)
from skyrl.backends.skyrl_train.inference_servers.transport import HttpTransport, RetryPolicy
from skyrl.errors import DeadlineError, EngineDiedError, InferenceError

logger = logging.getLogger(__name__)

SESSION_HEADER = "X-Session-ID"
TIMEOUT_KEY = "generator.trajectory_timeout_s"
HINT = "does the engine still generate? see its log"


class DataPlane:
    """Generation and other OpenAI-like calls; each holds one of the transport's places while it runs.

    Args:
        transport: Sends the requests.
        proxy_url: Router, or the only server.
        control: Aborts sends that were given up.
        retry: Bounds the continuations of requests that the engine aborts before their first token.
        retry_on_abort: Go on by itself when the engine aborts a request.
        timeout_s: Deadline of one call, counted from when it holds its place.
    """

    def __init__(
        self,
        transport: HttpTransport,
        proxy_url: str,
        control: ControlPlane,
        retry: RetryPolicy,
        retry_on_abort: bool,
        timeout_s: float,
    ) -> None:
        self._transport, self._proxy_url, self._control = transport, proxy_url, control
        self._retry, self._retry_on_abort, self._timeout_s = retry, retry_on_abort, timeout_s

    async def generate_or_fail(
        self, request: GenerationRequest
    ) -> tuple[Generation, InferenceError | DeadlineError | None]:
        """Sample one response; a failure becomes an empty response with stop reason ``error``.

        Raises:
            EngineDiedError: A server of this run died; all requests fail then.
        """
        try:
            return await self.generate(request), None
        except EngineDiedError:
            raise
        except (InferenceError, DeadlineError) as error:
            logger.warning("a generation request failed: %s", error)
            return failed(error, with_logprobs="logprobs" in request.sampling_params), error

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one response; where the engine aborts it, go on from its partial tokens.

        Raises:
            InferenceError: The engine refused it or could not be reached.
            DeadlineError: It took longer than ``timeout_s``, continuations included.
        """
        async with self._transport.slot():
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._generate(request)
            except TimeoutError as error:
                what = f"POST {self._proxy_url}{GENERATE_PATH}"
                raise DeadlineError("the inference client", what, self._timeout_s, TIMEOUT_KEY, HINT) from error

    async def _generate(self, request: GenerationRequest) -> Generation:
        generation = await self._send(request)
        whole, resumes, idle = generation, 0, 0
        while self._retry_on_abort and generation.stop_reason == "abort":
            following = continue_after_abort(request, generation, resumes := resumes + 1)
            if following is None:
                return join(whole, Generation(token_ids=[], stop_reason="length", logprobs=[]))
            idle = 0 if generation.token_ids else idle + 1
            if idle >= self._retry.attempts:
                raise InferenceError(f"the engine aborted a request {idle} times before its first token")
            if idle:
                await asyncio.sleep(self._retry.pause_s)
            request, generation = following, await self._send(following)
            whole = join(whole, generation)
        return whole

    async def _send(self, request: GenerationRequest) -> Generation:
        base_id = uuid.uuid4().hex
        sent = [base_id]
        headers = {"X-Request-Id": base_id}
        if request.session_id is not None:
            headers[SESSION_HEADER] = request.session_id

        def next_id(attempt: int) -> dict[str, str]:
            sent.append(f"{base_id}-{attempt}")
            return {"X-Request-Id": sent[-1]}

        reply = await self._transport.request(
            "POST", f"{self._proxy_url}{GENERATE_PATH}", json=request.body(), headers=headers, on_retry=next_id
        )
        if len(sent) > 1:
            # An earlier send may still run behind a router that lost us.
            await self._control.abort([ENGINE_REQUEST_PREFIX + name for name in sent[:-1]])
        return parse_generation(reply.body, request)

    async def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        """Send ``body`` to ``path``; the parsed answer. Raises ``DeadlineError`` after ``timeout_s``."""
        url = f"{self._proxy_url}{path}"
        async with self._transport.slot():
            reply = await self._transport.request_within(
                self._timeout_s, TIMEOUT_KEY, "POST", url, json=dict(body), headers=headers
            )
        return reply.body

    async def post_each(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        """``post`` for each body, all at once; answers in order."""
        return list(await asyncio.gather(*(self.post(path, body) for body in bodies)))
