"""An inference engine that answers from a script and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl.backends.skyrl_train.inference_servers.base import (
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
)
from skyrl.errors import DeadlineError


@dataclass(frozen=True)
class Call:
    """One prompt that the engine saw."""

    session: Hashable
    turn: int
    """Calls of this session before it."""
    prompt_ids: list[int]
    sampling_params: dict[str, Any]
    model: str | None
    cache_salt: str | None
    priority: int | None


@dataclass(frozen=True)
class Reply:
    """What the engine says to one call."""

    ids: Sequence[int]
    stop_reason: str = "stop"
    text: str | None = None
    """None decodes the ids with the tokenizer, special tokens skipped."""
    logprobs: Sequence[float] | None = None
    """None gives -0.01, -0.02, ... per token."""
    delay_s: float = 0.0
    error: Exception | None = None
    without_logprobs: bool = False


Script = Callable[[Call], Reply]


def script_of(*texts: str, tokenizer: Any, stop_reason: str = "stop") -> Script:
    """Answer turn i of every session with `texts[i]` and the tokenizer's EOS; the last text goes on for ever."""

    def reply(call: Call) -> Reply:
        text = texts[min(call.turn, len(texts) - 1)]
        ids = tokenizer.encode(text, add_special_tokens=False)
        return Reply([*ids, tokenizer.eos_token_id] if stop_reason == "stop" else ids, stop_reason)

    return reply


@dataclass
class FakeInferenceEngine(InferenceEngineInterface):
    """Scripted completions by (session, turn).

    While paused it keeps calls waiting and answers them in the order of their priority.
    """

    script: Script
    tokenizer: Any = None
    weight_version: int = 0
    calls: list[Call] = field(default_factory=list)
    finished_sessions: list[Hashable] = field(default_factory=list)
    running: int = 0
    waiting: int = 0
    paused: bool = False
    log: list[str] = field(default_factory=list)
    """`pause`, `resume` and `answer <session>`, in the order in which they happened."""

    def __post_init__(self) -> None:
        self._turns: dict[Hashable, int] = {}
        self._resumed: asyncio.Condition | None = None
        self._queue: list[tuple[int, int]] = []

    @property
    def model_name(self) -> str:
        return "fake"

    @property
    def open_sessions(self) -> set[Hashable]:
        """Sessions that were used and not finished."""
        return {call.session for call in self.calls} - set(self.finished_sessions)

    async def generate(self, input_batch: InferenceEngineInput, model: str | None = None) -> InferenceEngineOutput:
        prompts = input_batch["prompt_token_ids"]
        self.running += 1
        try:
            replies = [await self._reply(input_batch, row, model) for row in range(len(prompts))]
        finally:
            self.running -= 1
        logprobs = [self._logprobs(reply) for reply in replies]
        return InferenceEngineOutput(
            responses=[self._text(reply) for reply in replies],
            response_ids=[list(reply.ids) for reply in replies],
            stop_reasons=[reply.stop_reason for reply in replies],
            response_logprobs=None if any(values is None for values in logprobs) else logprobs,
        )

    async def _reply(self, batch: InferenceEngineInput, row: int, model: str | None) -> Reply:
        session = (batch.get("session_ids") or [None] * (row + 1))[row]
        params = batch.get("sampling_params") or {}
        call = Call(
            session=session,
            turn=self._turns.get(session, 0),
            prompt_ids=list(batch["prompt_token_ids"][row]),
            sampling_params=dict(params[row] if isinstance(params, list) else params),
            model=model,
            cache_salt=batch.get("cache_salt"),
            priority=(batch.get("priorities") or [None] * (row + 1))[row],
        )
        self._turns[session] = call.turn + 1
        self.calls.append(call)
        reply = self.script(call)
        await asyncio.sleep(reply.delay_s)
        if reply.error is not None:
            raise reply.error
        await self._wait_while_paused(call)
        self.log.append(f"answer {session}")
        if reply.without_logprobs or params_ask_no_logprobs(call.sampling_params):
            return Reply(reply.ids, reply.stop_reason, reply.text, without_logprobs=True)
        return reply

    async def _wait_while_paused(self, call: Call) -> None:
        if not self.paused:
            return
        ticket = (call.priority if call.priority is not None else 0, len(self.calls))
        self._queue.append(ticket)
        self.waiting += 1
        condition = self._condition()
        try:
            async with condition:
                await condition.wait_for(lambda: not self.paused and min(self._queue) == ticket)
                self._queue.remove(ticket)
                condition.notify_all()
        except BaseException:
            self._queue.remove(ticket)
            raise
        finally:
            self.waiting -= 1

    def _condition(self) -> asyncio.Condition:
        if self._resumed is None:
            self._resumed = asyncio.Condition()
        return self._resumed

    def _logprobs(self, reply: Reply) -> list[float] | None:
        if reply.without_logprobs:
            return None
        return list(reply.logprobs) if reply.logprobs is not None else [-0.01 * (i + 1) for i in range(len(reply.ids))]

    def _text(self, reply: Reply) -> str:
        if reply.text is not None:
            return reply.text
        return "" if self.tokenizer is None else self.tokenizer.decode(list(reply.ids), skip_special_tokens=True)

    async def finish_session(self, session_id: Hashable) -> None:
        await asyncio.sleep(0)
        self.finished_sessions.append(session_id)

    async def pause_generation(self, clear_cache: bool = False) -> None:
        self.paused = True
        self.log.append("pause")

    async def resume_generation(self) -> None:
        self.paused = False
        self.log.append("resume")
        condition = self._condition()
        async with condition:
            condition.notify_all()

    async def wait_until_queued(self, count: int, timeout_s: float) -> int:
        try:
            async with asyncio.timeout(timeout_s):
                while self.waiting < count:
                    await asyncio.sleep(0.001)
        except TimeoutError:
            raise DeadlineError("the client", f"{count} queued requests", timeout_s, "timeout_s") from None
        return self.waiting

    def get_endpoint_url(self) -> str:
        return "http://127.0.0.1:1"

    async def chat_completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    async def render_chat_completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    async def completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    async def wake_up(self, tags: list[str] | None = None) -> None:
        return None

    async def sleep(self, level: int = 2, tags: list[str] | None = None) -> None:
        return None

    async def init_weight_update_communicator(self, init_info: Any) -> None:
        return None

    async def update_named_weights(self, request: Any) -> None:
        return None

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        return None

    async def get_world_size(self) -> tuple[int, int]:
        return 1, 1

    async def teardown(self) -> None:
        return None


def params_ask_no_logprobs(params: dict[str, Any]) -> bool:
    return params.get("logprobs") is None
