"""One environment of one rollout: made, entered by one call at a time, and closed whatever happens.

Ordinary environments run in threads; one whose `init`, `step` or `close` is a coroutine function is awaited.
Every call has a deadline, and what comes back is checked.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import skyrl_gym
from skyrl.errors import DeadlineError
from skyrl.train.generators.env_threads import EnvJob, EnvThreadPool, start_signal, wait_for_job
from skyrl.types.rollout import ConversationType
from skyrl_gym.core import Env
from skyrl_gym.envs.base_text_env import BaseTextEnv

logger = logging.getLogger(__name__)

TIMEOUT_KEY = "generator.env_timeout_s"
OPEN_GRACE_S = 10.0
"""Seconds that a cancelled rollout waits for a constructor that has begun, so that it can close what comes out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStep:
    """A checked answer of an environment."""

    observations: ConversationType
    """New messages, possibly none."""
    reward: float
    """Finite."""
    done: bool
    """The episode is over."""
    postprocessed_action: str | None
    """Text that replaces the response."""
    reward_parts: dict[str, float]
    """What `metadata["rewards"]` names, finite; empty when it names nothing."""


class EnvSession:
    """Runs one environment.

    Args:
        env_class: Registered name.
        pool: Threads for its calls; None runs them on the event loop, where nothing can interrupt them.
        timeout_s: Seconds for one call.
    """

    def __init__(self, env_class: str, pool: EnvThreadPool | None, timeout_s: float) -> None:
        self.env_class = env_class
        self._pool = pool
        self._timeout_s = timeout_s
        self._env: Any = None
        self._job: EnvJob | None = None
        self._opening: EnvJob | None = None
        self._gave_up = False

    async def open(self, env_config: Any, extras: dict[str, Any]) -> None:
        """Make the environment."""
        make = partial(skyrl_gym.make, self.env_class, env_config=env_config, extras=extras)
        self._env = await self._call("make", make)

    async def init(self, prompt: ConversationType) -> ConversationType:
        """Start the episode and return its first messages."""
        answer = await self._call("init", self._env.init, prompt)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise TypeError(f"{self._name('init')} returned {_short(answer)}; it must return (messages, info)")
        messages = self._checked_messages(answer[0], "init")
        if not messages:
            raise ValueError(f"{self._name('init')} returned no messages")
        return messages

    async def step(self, action: str) -> EnvStep:
        """Hand a response to the environment and return its checked answer."""
        answer = await self._call("step", self._env.step, action)
        if not isinstance(answer, Mapping):
            raise TypeError(f"{self._name('step')} returned {_short(answer)}; it must return a BaseTextEnvStepOutput")
        missing = [key for key in ("reward", "done") if key not in answer]
        if missing:
            raise ValueError(f"{self._name('step')} returned no {' and no '.join(missing)}")
        replacement = answer.get("postprocessed_action")
        if replacement is not None and not isinstance(replacement, str):
            raise TypeError(f"{self._name('step')} returned the postprocessed_action {_short(replacement)}, not a text")
        return EnvStep(
            observations=self._checked_messages(answer.get("observations") or [], "step"),
            reward=self._checked_number(answer["reward"], "the reward"),
            done=bool(answer["done"]),
            postprocessed_action=replacement,
            reward_parts=self._checked_parts(answer.get("metadata")),
        )

    async def metrics(self) -> dict[str, Any]:
        """Return the metrics of the episode; none, with a warning, when they are no dict."""
        if _is_default(self._env.get_metrics, BaseTextEnv.get_metrics):
            return {}
        answer = await self._call("get_metrics", self._env.get_metrics)
        if not isinstance(answer, Mapping):
            logger.warning("%s returned %s instead of a dict; ignored", self._name("get_metrics"), _short(answer))
            return {}
        return dict(answer)

    async def close(self) -> None:
        """Close the environment, after the call that still runs in it, if there is one.

        A failure to close is logged: the rollout itself is over.
        """
        running, self._job = self._job, None
        if running is not None and running is self._opening and not self._gave_up:
            # Cancelled while the constructor runs: only once it is there can the environment be closed.
            await wait_for_job(running, None, min(self._timeout_s, OPEN_GRACE_S))
        if running is not None and not running.future.done():
            running.future.add_done_callback(partial(_close_after, self._env, self._name("close")))
            return
        env = self._env
        if env is None and self._opening is not None:
            env = _result_or_none(self._opening.future)
        self._env = self._opening = None
        if env is None or _is_default(env.close, Env.close):
            return
        try:
            await self._call("close", env.close)
        except Exception:
            logger.exception("%s failed", self._name("close"))

    def _name(self, method: str) -> str:
        return f"environment {self.env_class!r}: {method}()"

    async def _call(self, method: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            if inspect.iscoroutinefunction(function):
                return await self._await(function, *args)
            if self._pool is None:
                return function(*args)
            return await self._run_in_thread(method, self._pool, partial(function, *args))
        except _Expired:
            raise DeadlineError(
                waiter="a rollout",
                awaited=self._name(method),
                seconds=self._timeout_s,
                key=TIMEOUT_KEY,
                hint="raise the limit or look for a call inside the environment that blocks",
            ) from None

    async def _await(self, function: Callable[..., Any], *args: Any) -> Any:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await function(*args)
        except TimeoutError:
            if limit.expired():
                raise _Expired from None
            raise

    async def _run_in_thread(self, method: str, pool: EnvThreadPool, call: Callable[[], Any]) -> Any:
        started, set_started = start_signal()
        job = pool.submit(call, on_start=set_started)
        self._job = job
        if method == "make":
            self._opening = job
        ended = False
        try:
            ended = await wait_for_job(job, started, self._timeout_s)
        finally:
            if not ended:
                pool.abandon(job)
        if not ended:
            self._gave_up = True
            raise _Expired
        return job.future.result()

    def _checked_messages(self, messages: Any, method: str) -> ConversationType:
        if not isinstance(messages, list) or not all(
            isinstance(message, Mapping) and "role" in message and "content" in message for message in messages
        ):
            raise TypeError(
                f"{self._name(method)} returned the messages {_short(messages)}; they must be a list of "
                "{'role': ..., 'content': ...}"
            )
        return [dict(message) for message in messages]

    def _checked_parts(self, metadata: Any) -> dict[str, float]:
        parts = metadata.get("rewards") if isinstance(metadata, Mapping) else None
        if parts is None:
            return {}
        if not isinstance(parts, Mapping) or not all(isinstance(name, str) and name for name in parts):
            raise TypeError(
                f"{self._name('step')} returned metadata['rewards']={_short(parts)}; it must be a dict of named numbers"
            )
        return {name: self._checked_number(value, f"metadata['rewards'][{name!r}]") for name, value in parts.items()}

    def _checked_number(self, number: Any, what: str) -> float:
        try:
            value = float(number)
        except (TypeError, ValueError):
            raise TypeError(f"{self._name('step')} returned {what} {_short(number)}, not a number") from None
        if not math.isfinite(value):
            raise ValueError(f"{self._name('step')} returned {what} {value}")
        return value


class _Expired(Exception):
    """A call of the environment ran too long."""


def _is_default(method: Any, base: Callable[..., Any]) -> bool:
    """Say whether a method is the base's, which does nothing: most environments have no need of a thread for it."""
    return inspect.ismethod(method) and method.__func__ is base


def _result_or_none(future: Future[Any]) -> Any:
    if future.cancelled() or not future.done() or future.exception() is not None:
        return None
    return future.result()


def _close_after(env: Any, name: str, future: Future[Any]) -> None:
    """Close in the thread that has just left the environment; `env` is None while it was being made."""
    env = env if env is not None else _result_or_none(future)
    if env is None:
        return
    if inspect.iscoroutinefunction(env.close):
        logger.warning("%s was not called: the environment came too late to be awaited", name)
        return
    try:
        env.close()
    except Exception:
        logger.exception("%s failed", name)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
