"""The live progress line on a terminal, and printing above it."""

from __future__ import annotations

import io
import threading
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from skyrl.train.utils.progress_state import PhaseState, describe, parse_forwarded

_BAR_CELLS = 10


class TerminalSink:
    """One live line while a phase runs; it stays as plain text when the phase is over."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._live: Live | None = None
        self._lock = threading.RLock()

    def show(self, state: PhaseState) -> None:
        """Draw the line of a running phase, or leave the line of a finished one behind."""
        with self._lock:
            if state.finished:
                self._stop()
                self._console.print(Text(describe(state)), soft_wrap=True)
                return
            if self._live is None:
                # Our own filters print above the line; rich's would nest in them.
                self._live = Live(
                    console=self._console,
                    transient=True,
                    auto_refresh=False,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start()
            self._live.update(_line(state), refresh=True)

    def print_above(self, text: str) -> None:
        """Print a line that somebody else wrote, colour codes kept."""
        with self._lock:
            self._console.print(Text.from_ansi(text), soft_wrap=True)

    def close(self) -> None:
        """Remove the live line."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class TerminalFilter(io.TextIOBase):
    """Stands in for ``sys.stdout`` or ``sys.stderr``: progress lines reach the sink, others the stream.

    Args:
        stream: the real stream. If it is a terminal too, its lines are printed above the live line.
        sink: the live line.
    """

    def __init__(self, stream: TextIO, sink: TerminalSink) -> None:
        self._stream = stream
        self._sink = sink
        self._rest = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Pass on every whole line; the rest waits for its end or for `flush`."""
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                self._line(line)
        return len(text)

    def flush(self) -> None:
        """Flush the real stream."""
        self._stream.flush()

    def isatty(self) -> bool:
        """Whether the real stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Descriptor of the real stream."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the real stream."""
        return self._stream.encoding

    def close(self) -> None:
        """Pass on an unfinished line; the real stream stays open."""
        with self._lock:
            if self._rest:
                self._line(self._rest)
                self._rest = ""

    def _line(self, line: str) -> None:
        state = parse_forwarded(line)
        if state is not None:
            self._sink.show(state)
        elif self._stream.isatty():
            self._sink.print_above(line)
        else:
            self._stream.write(line + "\n")


def _line(state: PhaseState) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    if state.total:
        filled = round(_BAR_CELLS * min(1.0, state.done / state.total))
        text.append("━" * filled, style="green")
        text.append("━" * (_BAR_CELLS - filled), style="bright_black")
        text.append("  ")
    text.append(describe(state))
    return text
