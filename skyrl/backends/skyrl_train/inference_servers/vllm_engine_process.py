"""Where vLLM's engine core runs: as a thread of the server's process, or as a child that dies with its parent.

vLLM's async front end always starts its engine core through ``vllm.v1.engine.utils.get_mp_context().Process``. The two
contexts here take that call's place; ``use_engine_threads`` and ``use_guarded_processes`` choose one, once per process.
The thread saves a second interpreter start, imports included (about 6 s and 0.6 GB on a CPU host), and leaves no
child behind. It rests on vLLM's internals, so ``process`` mode stays available and a test pins both.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.context import BaseContext, SpawnProcess
from types import FrameType
from typing import Any

import psutil

logger = logging.getLogger(__name__)

PARENT_POLL_S = 1.0
PARENT_GONE_GRACE_S = 5.0

_SignalHandler = Callable[[int, FrameType | None], Any] | int | None


class EngineThread(threading.Thread):
    """A thread with the part of ``multiprocessing.Process`` that vLLM uses.

    ``sentinel`` is a file descriptor that turns readable when the thread ends; ``terminate`` calls the handler that the
    engine core asked to have installed for SIGTERM.
    """

    def __init__(self, target: Callable[..., None], name: str, kwargs: dict[str, Any]) -> None:
        super().__init__(name=name, daemon=True)
        self._target_function, self._target_kwargs = target, kwargs
        self._ended, self._end_signal = os.pipe()
        self.handlers: dict[int, _SignalHandler] = {}
        self.exitcode: int | None = None
        self.failure: BaseException | None = None
        self.pid: int | None = None

    @property
    def sentinel(self) -> int:
        """File descriptor that turns readable at the end."""
        return self._ended

    def run(self) -> None:
        """Run the target; whatever it raises ends up in ``exitcode``."""
        code = 1
        try:
            self._target_function(**self._target_kwargs)
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
        except BaseException as error:
            self.failure = error
            logger.exception("engine core %s failed", self.name)
        finally:
            self.exitcode = code
            # vLLM polls for readable data; a bare hang-up would be reported as an error event.
            os.write(self._end_signal, b"\0")
            os.close(self._end_signal)

    def close(self) -> None:
        """Close ``sentinel`` of a thread that has ended, when nobody needs to watch it any more; again does nothing."""
        ended, self._ended = self._ended, -1
        if ended >= 0:
            os.close(ended)

    def terminate(self) -> None:
        """Ask the engine core to stop."""
        handler = self.handlers.get(signal.SIGTERM)
        if callable(handler):
            handler(signal.SIGTERM, None)

    kill = terminate


class EngineThreads:
    """Looks like a multiprocessing context; its processes are threads."""

    def __init__(self) -> None:
        self._threads: list[EngineThread] = []

    def Process(self, *, target: Callable[..., None], name: str, kwargs: dict[str, Any]) -> EngineThread:
        """A new engine thread, not yet started."""
        thread = EngineThread(target, name, kwargs)
        self._threads.append(thread)
        return thread

    def close(self, timeout_s: float) -> None:
        """Wait for the threads to end and close their sentinels; one that still runs then keeps its own."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
            if not thread.is_alive():
                thread.close()

    def failure(self) -> BaseException | None:
        """What ended an engine thread, if one failed."""
        return next((thread.failure for thread in self._threads if thread.failure is not None), None)


class _ThreadSignals:
    """The ``signal`` module as an engine thread sees it: handlers are remembered, none is installed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(signal, name)

    @staticmethod
    def signal(signum: int, handler: _SignalHandler) -> _SignalHandler:
        thread = threading.current_thread()
        if not isinstance(thread, EngineThread):
            return signal.signal(signum, handler)
        previous = thread.handlers.get(signum, signal.SIG_DFL)
        thread.handlers[signum] = handler
        return previous


def _run_guarded(parent: tuple[int, float], target: Callable[..., None], kwargs: dict[str, Any]) -> None:
    """Entry of a guarded child: run ``target``, but not longer than the parent lives."""
    threading.Thread(target=_die_with, args=parent, name="parent-watch", daemon=True).start()
    target(**kwargs)


def _die_with(pid: int, create_time: float) -> None:
    """Wait until the process ``pid`` that started at ``create_time`` is gone, then end this process."""
    while is_running(pid, create_time):
        time.sleep(PARENT_POLL_S)
    logger.error("parent process %d is gone; ending", pid)
    os.kill(os.getpid(), signal.SIGTERM)  # vLLM's handler frees shared memory and stops its workers
    time.sleep(PARENT_GONE_GRACE_S)
    os._exit(1)


def is_running(pid: int, create_time: float) -> bool:
    """Whether the process ``pid`` that started at ``create_time`` (seconds since the epoch) still runs."""
    try:
        process = psutil.Process(pid)
        return process.create_time() == create_time and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class _GuardedContext:
    """A spawn context whose processes end when this process ends, however it ends."""

    def __init__(self, context: BaseContext) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Process(self, *, target: Callable[..., None], name: str, kwargs: dict[str, Any]) -> SpawnProcess:
        """A new child, not yet started."""
        me = psutil.Process()
        arguments = ((me.pid, me.create_time()), target, kwargs)
        child: SpawnProcess = self._context.Process(  # type: ignore[attr-defined]
            target=_run_guarded, name=name, args=arguments
        )
        return child


def use_engine_threads() -> EngineThreads:
    """From now on, vLLM's engine core of this process is a thread of it. Call before the engine is built."""
    import vllm.v1.engine.core
    import vllm.v1.engine.utils

    threads = EngineThreads()
    vllm.v1.engine.utils.get_mp_context = lambda: threads
    vllm.v1.engine.core.signal = _ThreadSignals()
    return threads


def use_guarded_processes() -> None:
    """From now on, vLLM's engine core of this process is a child that dies with it. Call before the engine is built."""
    import vllm.v1.engine.utils

    context = _GuardedContext(multiprocessing.get_context("spawn"))
    vllm.v1.engine.utils.get_mp_context = lambda: context
