"""metrics.jsonl has one line a step and survives crashes and resumes."""

import json
import os

import numpy as np
import pytest

from skyrl.train.utils.metrics_file import MetricsFile, read_metrics


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "run/metrics.jsonl")


def lines(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def test_one_committed_step_is_one_line_at_once(path):
    file = MetricsFile(path)
    file.log({"reward/avg_raw_reward": np.float32(0.5)}, step=1)
    assert lines(path) == []
    file.log({"timing/step": 2.0, "gap": float("nan")}, step=1, commit=True)
    assert lines(path) == [{"step": 1, "reward/avg_raw_reward": 0.5, "timing/step": 2.0, "gap": None}]
    file.close()


def test_an_uncommitted_step_is_written_when_the_next_one_comes_or_at_the_end(path):
    file = MetricsFile(path)
    file.log({"a": 1}, step=1)
    file.log({"a": 2}, step=2)
    assert lines(path) == [{"step": 1, "a": 1}]
    file.close()
    file.close()
    assert [line["a"] for line in lines(path)] == [1, 2]


def test_a_resumed_run_appends_and_a_repeated_step_is_merged_later_values_first(path):
    for values in ({"reward": 0.1, "only": 1}, {"reward": 0.2}):
        file = MetricsFile(path)
        file.log(values, step=6, commit=True)
        file.close()
    assert len(lines(path)) == 2
    assert read_metrics(path) == [{"step": 6, "reward": 0.2, "only": 1}]


def test_a_line_cut_by_a_crash_is_ended_and_skipped(path):
    os.makedirs(os.path.dirname(path))
    with open(path, "w") as file:
        file.write('{"step": 1, "a": 1}\n{"step": 2, "a"')
    metrics = MetricsFile(path)
    metrics.log({"a": 3}, step=3, commit=True)
    metrics.close()
    assert read_metrics(path) == [{"step": 1, "a": 1}, {"step": 3, "a": 3}]


def test_steps_come_in_numeric_order(path):
    file = MetricsFile(path)
    for step in (10, 9, 0):
        file.log({}, step=step, commit=True)
    file.close()
    assert [row["step"] for row in read_metrics(path)] == [0, 9, 10]


def test_an_empty_flush_writes_nothing(path):
    file = MetricsFile(path)
    file.flush()
    file.close()
    assert os.path.getsize(path) == 0
