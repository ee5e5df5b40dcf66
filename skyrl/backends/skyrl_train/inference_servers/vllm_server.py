"""One vLLM OpenAI server in a thread of this process: start, health, graceful stop, and what killed it.

No Ray here: the server actor and the command-line entry both hold a ``VLLMServer``. vLLM's stock application runs
unchanged on an event loop of its own; only the place of the engine core is ours (``vllm_engine_process``).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, get_args

from skyrl.backends.skyrl_train.inference_servers import vllm_engine_process
from skyrl.backends.skyrl_train.inference_servers.common import LOOPBACK, ServerInfo
from skyrl.backends.skyrl_train.inference_servers.health import START_TIMEOUT_KEY, answers_health
from skyrl.backends.skyrl_train.inference_servers.vllm_engine_process import EngineThreads
from skyrl.errors import ConfigError, DeadlineError, InferenceError

logger = logging.getLogger(__name__)

ServerMode = Literal["embedded", "process"]
"""``embedded``: the engine core is a thread of the server's process; ``process``: vLLM's own layout."""

HEALTH_POLL_S = 0.05
ENGINE_END_TIMEOUT_S = 2.0
FRONT_END_LOGGER = "vllm.v1.engine.async_llm"


class VLLMServer:
    """Runs one server until ``stop``; ``wait`` returns what ended it.

    Args:
        args: A complete namespace of vLLM's API server (``complete_server_args``).
        sock: A bound socket, not yet listening; the server owns it from now on. Its address must be ``args``'.
        mode: See ``ServerMode``.
    """

    def __init__(self, args: argparse.Namespace, sock: socket.socket, mode: ServerMode) -> None:
        if mode not in get_args(ServerMode):
            raise ConfigError(
                f"generator.inference_engine.server_mode={mode!r} is none of auto, {', '.join(get_args(ServerMode))}"
            )
        self._args, self._socket, self._mode = args, sock, mode
        self._loop: _ServerLoop | None = None
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._engine_threads: EngineThreads | None = None
        self._thread = threading.Thread(target=self._run, name="vllm-server", daemon=True)

    def start(self) -> None:
        """Begin to start; returns at once."""
        self._thread.start()

    def wait_until_healthy(self, timeout_s: float) -> None:
        """Block until ``/health`` answers 200.

        Raises:
            InferenceError: The server ended before that; the cause is chained.
            DeadlineError: It did not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        url = ServerInfo(self._args.host or LOOPBACK, self._args.port).url
        while not answers_health(url):
            if self._ended.wait(HEALTH_POLL_S):
                raise self._error("ended while starting")
            if time.monotonic() > deadline:
                raise DeadlineError(
                    "the server actor",
                    f"vLLM at {self._address()}",
                    timeout_s,
                    START_TIMEOUT_KEY,
                    "see the server's log; a large model may need more time",
                )

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the server ends, or ``timeout_s`` is over; True when it ended because ``stop`` asked for it.

        Raises:
            InferenceError: It ended by itself: the engine or the application died.
        """
        if not self._ended.wait(timeout_s):
            return False
        if self._stopping.is_set():
            return True
        raise self._error("died")

    def stop(self, timeout_s: float) -> bool:
        """Stop gracefully: running requests are aborted, the engine ends, the port is free. True when done in time."""
        self._stopping.set()
        deadline = time.monotonic() + timeout_s
        front_end = logging.getLogger(FRONT_END_LOGGER)
        front_end.addFilter(is_no_expected_end)
        try:
            while self._thread.is_alive() and time.monotonic() < deadline:
                loop = self._loop
                if loop is not None:
                    loop.deliver(signal.SIGTERM)
                self._thread.join(0.2)
        finally:
            front_end.removeFilter(is_no_expected_end)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._make_loop) as runner:
                runner.run(self._serve())
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            self._failure = error
            logger.exception("vLLM server at %s ended with an error", self._address())
        finally:
            self._socket.close()
            self._ended.set()
            if self._engine_threads is not None:
                self._engine_threads.close(ENGINE_END_TIMEOUT_S)

    def _make_loop(self) -> asyncio.AbstractEventLoop:
        self._loop = _ServerLoop.create()
        return self._loop.loop

    async def _serve(self) -> None:
        from vllm.entrypoints.openai import api_server
        from vllm.utils.system_utils import set_ulimit

        if self._mode == "embedded":
            self._engine_threads = vllm_engine_process.use_engine_threads()
        else:
            vllm_engine_process.use_guarded_processes()
        api_server.validate_api_server_args(self._args)
        set_ulimit()
        await api_server.run_server_worker(f"http://{self._address()}", self._socket, self._args)

    def _address(self) -> str:
        return f"{self._args.host}:{self._args.port}"

    def _error(self, what: str) -> InferenceError:
        in_engine = self._engine_threads.failure() if self._engine_threads is not None else None
        cause = in_engine or self._failure
        reason = f"{type(cause).__name__}: {cause}" if cause is not None else "its engine core ended; see the log"
        error = InferenceError(f"vLLM server at {self._address()} ({self._mode} mode) {what}: {reason}")
        error.__cause__ = cause
        return error


def is_no_expected_end(record: logging.LogRecord) -> bool:
    """Log filter while a server is stopped: vLLM's front end then reports its engine as dead, with a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "EngineDeadError"


class _ServerLoop:
    """An event loop off the main thread: signal handlers are kept, and called by ``deliver``."""

    def __init__(self) -> None:
        self.handlers: dict[int, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
        self.loop: asyncio.AbstractEventLoop

    @classmethod
    def create(cls) -> _ServerLoop:
        import uvloop

        holder = cls()

        class Loop(uvloop.Loop):
            def add_signal_handler(  # type: ignore[override]
                self, sig: int, callback: Callable[..., Any], *args: Any
            ) -> None:
                holder.handlers[sig] = (callback, args)

            def remove_signal_handler(self, sig: int) -> bool:
                return holder.handlers.pop(sig, None) is not None

        holder.loop = Loop()
        return holder

    def deliver(self, sig: int) -> None:
        handler = self.handlers.get(sig)
        if handler is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(handler[0], *handler[1])


def complete_server_args(overrides: argparse.Namespace) -> argparse.Namespace:
    """VLLM's own defaults with ``overrides`` on top.

    Raises:
        ConfigError: An override is no argument of vLLM's API server; lists near names.
    """
    import difflib

    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    for name, value in vars(overrides).items():
        if name not in vars(args):
            near = difflib.get_close_matches(name, vars(args), n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"valid names: {', '.join(sorted(vars(args)))}"
            raise ConfigError(
                f"generator.inference_engine.engine_init_kwargs.{name} is no argument of vLLM's server; {hint}"
            )
        setattr(args, name, value)
    validate_parsed_serve_args(args)
    return args
