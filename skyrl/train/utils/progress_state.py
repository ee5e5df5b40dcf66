"""One moment of a phase of training: as text for people and as a line for the driver."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

_MARK = "\x1fskyrl-progress "


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseState:
    """A phase at one moment, e.g. ``PhaseState(phase="generate", step=3, steps=26, done=96, total=128, ...)``."""

    phase: str
    """Name of the phase."""
    step: int
    """Training step that it belongs to."""
    steps: int | None
    """Steps of the whole run; None if unknown."""
    done: int = 0
    """Units finished."""
    total: int | None = None
    """Units in all; None for a phase without units."""
    unit: str = ""
    """What is counted, plural."""
    tokens: int = 0
    """Tokens processed; 0 if not counted."""
    seconds: float = 0.0
    """Time since the phase began."""
    run_left_s: float | None = None
    """Estimated time to the end of the run; None before the first finished step."""
    finished: bool = False
    """Whether the phase is over."""


def forward_line(state: PhaseState) -> str:
    """The marked line that carries a state from a worker's standard output to the driver."""
    return f"{_MARK}{json.dumps(asdict(state))}"


def parse_forwarded(line: str) -> PhaseState | None:
    """The state in a marked line (Ray puts its own prefix before the mark), or None for any other line."""
    _, found, text = line.partition(_MARK)
    if not found:
        return None
    try:
        # Ray may add colour codes after the line.
        return PhaseState(**json.JSONDecoder().raw_decode(text)[0])
    except (json.JSONDecodeError, TypeError):
        return None


def describe(state: PhaseState) -> str:
    """One line of text, e.g. ``step 3/26  generate  96/128 rollouts (20.6/s, 490 tok/s)  4.7 s, 2 s left  ...``."""
    parts = [f"step {state.step}" if state.steps is None else f"step {state.step}/{state.steps}", state.phase]
    rates = []
    if state.seconds > 0 and state.done:
        rates.append(f"{state.done / state.seconds:.1f}/s")
    if state.seconds > 0 and state.tokens:
        rates.append(f"{state.tokens / state.seconds:.0f} tok/s")
    if state.done or state.total is not None:
        count = str(state.done) if state.total is None else f"{state.done}/{state.total}"
        parts.append(
            " ".join([count, *([state.unit] if state.unit else []), *([f"({', '.join(rates)})"] if rates else [])])
        )
    elif rates:
        parts.append(", ".join(rates))
    left = None if state.finished else phase_left_s(state)
    parts.append(f"{state.seconds:.1f} s" if left is None else f"{state.seconds:.1f} s, {format_seconds(left)} left")
    if state.run_left_s is not None:
        parts.append(f"run {format_seconds(state.run_left_s)} left")
    return "  ".join(parts)


def phase_left_s(state: PhaseState) -> float | None:
    """Seconds to the end of the phase at its mean rate so far, or None without a rate."""
    if state.total is None or not state.done or state.seconds <= 0:
        return None
    return max(0, state.total - state.done) * state.seconds / state.done


def format_seconds(seconds: float) -> str:
    """Duration for people: ``45 s``, ``8 min 10 s``, ``2 h 05 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
