"""Phases report rates and time left; a worker's states travel to the driver's terminal."""

import logging
import os
import pty
import re
import subprocess
import sys
import textwrap

import pytest

from skyrl.train.utils import progress
from skyrl.train.utils.progress import FORWARD_VARIABLE, ForwardSink, LogSink, Progress, choose_sink
from skyrl.train.utils.progress_state import PhaseState, describe, format_seconds, forward_line, parse_forwarded


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Sink:
    def __init__(self):
        self.states = []

    def show(self, state):
        self.states.append(state)

    def close(self):
        self.states.append("closed")


@pytest.fixture
def clock():
    return Clock()


def test_a_phase_is_shown_at_its_start_and_its_end(clock):
    sink = Sink()
    tracked = Progress(26, sink, clock)
    with tracked.phase("generate", 3, total=8, unit="rollouts") as phase:
        for _ in range(8):
            clock.now += 0.5
            phase.advance(tokens=10)
    tracked.close()
    first, *_, last, closed = sink.states
    assert (first.phase, first.step, first.steps, first.done, first.seconds) == ("generate", 3, 26, 0, 0.0)
    assert (last.done, last.tokens, last.seconds, last.finished) == (8, 80, 4.0, True)
    assert closed == "closed"


def test_many_quick_units_are_shown_a_few_times_a_second(clock):
    sink = Sink()
    with Progress(1, sink, clock).phase("generate", 1, total=1000) as phase:
        for _ in range(1000):
            clock.now += 0.001
            phase.advance()
    assert 4 <= len(sink.states) <= 7
    assert sink.states[-1].done == 1000


def test_a_phase_that_raises_is_not_reported_as_finished(clock):
    sink = Sink()
    with pytest.raises(RuntimeError), Progress(1, sink, clock).phase("train", 1):
        raise RuntimeError
    assert not any(state.finished for state in sink.states)


def test_the_rest_of_the_run_is_steps_left_times_the_mean_of_the_last_ten(clock):
    tracked = Progress(40, Sink(), clock)
    assert tracked.run_left_s() is None
    for step in range(1, 31):
        clock.now += 100.0 if step <= 20 else 2.0
        tracked.step_done(step)
    assert tracked.run_left_s() == pytest.approx(10 * 2.0)


def test_without_a_number_of_steps_there_is_no_estimate(clock):
    tracked = Progress(None, Sink(), clock)
    clock.now += 1
    tracked.step_done(1)
    assert tracked.run_left_s() is None


def test_a_resumed_run_counts_only_the_steps_that_are_left(clock):
    tracked = Progress(10, Sink(), clock)
    clock.now += 3.0
    tracked.step_done(8)
    assert tracked.run_left_s() == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            PhaseState(
                phase="generate", step=3, steps=26, done=96, total=128, unit="rollouts", tokens=960, seconds=4.8
            ),
            "step 3/26  generate  96/128 rollouts (20.0/s, 200 tok/s)  4.8 s, 2 s left",
        ),
        (
            PhaseState(phase="generate", step=3, steps=26, done=8, total=8, seconds=4.0, run_left_s=490, finished=True),
            "step 3/26  generate  8/8 (2.0/s)  4.0 s  run 8 min 10 s left",
        ),
        (PhaseState(phase="sync", step=1, steps=None, seconds=0.51), "step 1  sync  0.5 s"),
        (PhaseState(phase="train", step=1, steps=2, tokens=500, seconds=2.0), "step 1/2  train  250 tok/s  2.0 s"),
        (PhaseState(phase="x", step=1, steps=2, total=4, unit="rows"), "step 1/2  x  0/4 rows  0.0 s"),
    ],
)
def test_a_state_reads_as_one_line(state, text):
    assert describe(state) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (490, "8 min 10 s"), (7500, "2 h 05 min")],
)
def test_durations_are_for_people(seconds, text):
    assert format_seconds(seconds) == text


def test_a_forwarded_line_survives_ray_s_prefix_and_colours():
    state = PhaseState(phase="generate", step=3, steps=None, done=2, total=4, run_left_s=1.5)
    line = f"\x1b[36m(entry pid=12)\x1b[0m {forward_line(state)}\x1b[32m [repeated 2x]\x1b[0m"
    assert parse_forwarded(line) == state
    assert "\n" not in forward_line(state)


@pytest.mark.parametrize("line", ["", "an ordinary line", forward_line.__doc__, "\x1fskyrl-progress {broken"])
def test_other_lines_are_no_states(line):
    assert parse_forwarded(line) is None


def test_without_a_terminal_the_log_gets_one_line_a_phase(clock, caplog):
    caplog.set_level(logging.INFO)
    with Progress(2, LogSink(clock), clock).phase("generate", 1, total=4, unit="rollouts") as phase:
        for _ in range(4):
            clock.now += 1.0
            phase.advance()
    assert caplog.messages == ["step 1/2  generate  4/4 rollouts (1.0/s)  4.0 s"]


def test_a_long_phase_speaks_every_half_minute(clock, caplog):
    caplog.set_level(logging.INFO)
    with Progress(2, LogSink(clock), clock).phase("generate", 1, total=100) as phase:
        for _ in range(70):
            clock.now += 1.0
            phase.advance()
    assert len(caplog.messages) == 3
    assert caplog.messages[0].startswith("step 1/2  generate  30/100")


def test_the_sink_follows_the_environment(monkeypatch, capsys):
    monkeypatch.delenv(FORWARD_VARIABLE, raising=False)
    assert isinstance(choose_sink(), LogSink)
    monkeypatch.setenv(FORWARD_VARIABLE, "1")
    sink = choose_sink()
    assert isinstance(sink, ForwardSink)
    state = PhaseState(phase="sync", step=1, steps=1)
    sink.show(state)
    assert parse_forwarded(capsys.readouterr().out) == state


def test_without_a_terminal_the_driver_changes_nothing(monkeypatch):
    monkeypatch.delenv(FORWARD_VARIABLE, raising=False)
    before = sys.stdout
    with progress.terminal_progress():
        assert sys.stdout is before and FORWARD_VARIABLE not in os.environ


DRIVER = """
    import logging, os, sys
    from skyrl.train.utils.progress import Progress, terminal_progress
    from skyrl.utils.log import configure_logging
    configure_logging()
    with terminal_progress():
        assert os.environ["SKYRL_PROGRESS_FORWARD"] == "1"
        run = Progress(2)  # prints marked lines, as a worker's would arrive
        with run.phase("generate", 1, total=2, unit="rollouts") as phase:
            print("a worker's line", file=sys.stderr)
            phase.advance(2)
            logging.getLogger("skyrl").info("a log record")
        print("unfinished", end="")
    assert "SKYRL_PROGRESS_FORWARD" not in os.environ
    print('{"done": true}')
"""


def test_on_a_terminal_the_line_is_live_and_the_rest_appears_above(monkeypatch):
    monkeypatch.delenv(FORWARD_VARIABLE, raising=False)
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER)],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment,
    )
    os.close(follower)
    written = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # Linux reports the closed terminal so
            break
        if not chunk:
            break
        written += chunk
    os.close(leader)
    assert child.wait(timeout=60) == 0, written
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.decode()).replace("\r", "\n")
    assert "skyrl-progress" not in text
    assert "━━━━━━━━━━  step 1/2  generate  0/2 rollouts" in text
    assert re.search(r"\nstep 1/2  generate  2/2 rollouts \([\d.]+/s\)  [\d.]+ s\n", text)
    assert "\na worker's line\n" in text and "a log record" in text and "unfinished" in text
    assert text.rstrip().endswith('{"done": true}')
