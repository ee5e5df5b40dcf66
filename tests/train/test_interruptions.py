"""A run that is interrupted leaves nothing running and goes on where its last checkpoint was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl.train.utils.metrics_file import read_metrics
from tests.fakes.digit_run import SIGNAL_VARIABLE, overrides
from tests.fakes.processes import eventually, processes_of
from tests.fakes.vllm_server import SharedServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


def run(server: SharedServer, folder: Path, *extra: str, interrupt: tuple[signal.Signals, int] | None = None) -> int:
    """Run the command line in a process of its own; returns its exit code."""
    tokens = overrides(server.url, server.model_dir, folder, "trainer.ckpt_interval=2", *extra)
    environment = dict(os.environ)
    if interrupt is not None:
        environment[SIGNAL_VARIABLE] = f"{int(interrupt[0])}:{interrupt[1]}"
    with (folder / "output.log").open("ab") as output:
        command = [sys.executable, "-m", "tests.fakes.digit_run", *tokens]
        return subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=120).returncode


def assert_nothing_left(folder: Path) -> None:
    """Ray's processes may take some seconds to see that their driver is gone."""
    assert eventually(lambda: not processes_of(folder), 30), processes_of(folder)


def checkpoints(folder: Path) -> list[str]:
    """Everything in the checkpoint folder, hidden leftovers included."""
    return sorted(path.name for path in (folder / "ckpt").iterdir())


def test_ctrl_c_and_kill_leave_nothing_and_the_run_goes_on(vllm_server: SharedServer, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    code = run(vllm_server, folder, "trainer.max_training_steps=4", interrupt=(signal.SIGINT, 3))
    assert code == 130
    assert_nothing_left(folder)
    assert checkpoints(folder) == ["global_step_2", "latest_ckpt_global_step.txt"]

    latest = "trainer.resume_mode=latest"
    code = run(vllm_server, folder, "trainer.max_training_steps=4", latest, interrupt=(signal.SIGKILL, 3))
    assert code == -signal.SIGKILL
    assert_nothing_left(folder)
    assert checkpoints(folder) == ["global_step_2", "latest_ckpt_global_step.txt"]

    assert run(vllm_server, folder, "trainer.max_training_steps=4", latest) == 0
    assert_nothing_left(folder)
    # Step 3 ends an epoch: that is a save too.
    assert checkpoints(folder) == ["global_step_2", "global_step_3", "global_step_4", "latest_ckpt_global_step.txt"]
    records = read_metrics(str(folder / "export" / "runs" / "test_run" / "metrics.jsonl"))
    assert [record["step"] for record in records] == [1, 2, 3, 4]
