"""What the run is doing now: one line per phase (generate, train, sync) with rates and time left.

The controller runs in a Ray worker, which has no terminal. So it prints its states as marked lines, Ray carries them
to the driver, and the driver's `terminal_progress` turns them into one live line. Without a terminal anywhere each
phase gives one plain log line at its end, and a long one also a line every half minute.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Protocol

from skyrl.train.utils.progress_state import PhaseState, describe, forward_line
from skyrl.utils.log import configure_logging

logger = logging.getLogger(__name__)

FORWARD_VARIABLE = "SKYRL_PROGRESS_FORWARD"
"""Set to 1 by a driver that has a terminal; workers that it starts then print marked lines."""

_HEARTBEAT_S = 30.0
_UPDATE_S = 0.25
_STEPS_AVERAGED = 10


class ProgressSink(Protocol):
    """Where states go."""

    def show(self, state: PhaseState) -> None:
        """Show a running or finished phase."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class Phase:
    """A running phase; `advance` it from the event loop or from any thread."""

    def __init__(self, progress: Progress, start: PhaseState) -> None:
        self._progress = progress
        self._start = start
        self._began_s = progress.clock()
        self._done = self._tokens = 0

    def advance(self, count: int = 1, tokens: int = 0) -> None:
        """Count finished units, and the tokens in them."""
        self._done += count
        self._tokens += tokens
        self._progress.changed(self)

    def state(self, finished: bool = False) -> PhaseState:
        """The phase as it is now."""
        fields = asdict(self._start)
        fields |= {"done": self._done, "tokens": self._tokens, "seconds": self._progress.clock() - self._began_s}
        return PhaseState(**{**fields, "run_left_s": self._progress.run_left_s(), "finished": finished})


class Progress:
    """Progress of a run, kept by the controller.

    Args:
        steps: steps of the whole run; None if unknown.
        sink: where states go; None chooses by `choose_sink`.
        clock: monotonic seconds.
    """

    def __init__(
        self, steps: int | None, sink: ProgressSink | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self._steps = steps
        self._sink = choose_sink() if sink is None else sink
        self._shown_s = float("-inf")
        self._last_step_s = clock()
        self._step_seconds: deque[float] = deque(maxlen=_STEPS_AVERAGED)
        self._steps_left: int | None = steps

    @contextmanager
    def phase(self, name: str, step: int, total: int | None = None, unit: str = "") -> Iterator[Phase]:
        """Show a phase while the block runs; one that raises leaves no line of success."""
        phase = Phase(self, PhaseState(phase=name, step=step, steps=self._steps, total=total, unit=unit))
        self._sink.show(phase.state())
        yield phase
        self._sink.show(phase.state(finished=True))

    def step_done(self, step: int) -> None:
        """A step is finished; the estimate of the rest rests on the last ten."""
        now = self.clock()
        self._step_seconds.append(now - self._last_step_s)
        self._last_step_s = now
        if self._steps is not None:
            self._steps_left = max(0, self._steps - step)

    def run_left_s(self) -> float | None:
        """Seconds to the end of the run, or None before the first finished step."""
        if not self._step_seconds or self._steps_left is None:
            return None
        return self._steps_left * sum(self._step_seconds) / len(self._step_seconds)

    def changed(self, phase: Phase) -> None:
        """Show a phase again, a few times a second at most."""
        now = self.clock()
        if now - self._shown_s >= _UPDATE_S:
            self._shown_s = now
            self._sink.show(phase.state())

    def close(self) -> None:
        """The run is over."""
        self._sink.close()


class LogSink:
    """Plain lines in the log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spoke_s = clock()

    def show(self, state: PhaseState) -> None:
        """Log the end of a phase, and every half minute of a long one."""
        if state.seconds == 0.0:
            self._spoke_s = self._clock()
        if state.finished or self._clock() - self._spoke_s >= _HEARTBEAT_S:
            self._spoke_s = self._clock()
            logger.info("%s", describe(state))

    def close(self) -> None:
        """Nothing to do."""


class ForwardSink:
    """Marked lines on standard output, which Ray carries to the driver."""

    def show(self, state: PhaseState) -> None:
        """Write the state as one line."""
        sys.stdout.write(forward_line(state) + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        """Nothing to do."""


def choose_sink() -> ProgressSink:
    """The sink of this process: the driver's terminal, this process's own, or the log."""
    if os.environ.get(FORWARD_VARIABLE) == "1":
        return ForwardSink()
    if sys.stderr.isatty():
        from skyrl.train.utils.progress_terminal import TerminalSink

        return TerminalSink(sys.stderr)
    return LogSink()


@contextmanager
def terminal_progress() -> Iterator[None]:
    """In the driver: show the progress of the workers started inside as one live line; plain log without a terminal.

    Everything else that is printed meanwhile appears above that line.
    """
    if not sys.stderr.isatty():
        yield
        return
    from skyrl.train.utils.progress_terminal import TerminalFilter, TerminalSink

    before = os.environ.get(FORWARD_VARIABLE)
    stdout, stderr = sys.stdout, sys.stderr
    sink = TerminalSink(stderr)
    os.environ[FORWARD_VARIABLE] = "1"
    filters = TerminalFilter(stdout, sink), TerminalFilter(stderr, sink)
    sys.stdout, sys.stderr = filters
    configure_logging()
    try:
        yield
    finally:
        for stream in filters:
            stream.close()
        sink.close()
        sys.stdout, sys.stderr = stdout, stderr
        configure_logging()
        if before is None:
            del os.environ[FORWARD_VARIABLE]
        else:
            os.environ[FORWARD_VARIABLE] = before
