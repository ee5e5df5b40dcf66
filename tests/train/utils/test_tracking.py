"""Metrics reach every tracker, the file is always written, and a failure is recorded once."""

import json
import logging
import sys
import types

import numpy as np
import pytest
import torch

from skyrl.errors import ConfigError
from skyrl.train.utils import tracker_backends
from skyrl.train.utils.tracker_backends import TRACKERS, TrackerBackend, flatten_params, format_metrics, traceback_text
from skyrl.train.utils.tracking import Tracking


class Recorder(TrackerBackend):
    """Keeps every call."""

    supports_tables = True

    def __init__(self, run):
        self.run, self.calls = run, []

    def log(self, data, step, commit):
        self.calls.append(("log", dict(data), step, commit))

    def log_table(self, key, columns, rows, step):
        self.calls.append(("table", key, list(columns), rows, step))

    def log_exception(self, error, step):
        self.calls.append(("exception", error, step))

    def finish(self, failed):
        self.calls.append(("finish", failed))


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setitem(TRACKERS, "recorder", Recorder)


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def test_the_metrics_file_is_written_whatever_the_tracker(tmp_path):
    tracker = Tracking("p", "run", backend="console", run_dir=str(tmp_path))
    tracker.log({"reward/avg_raw_reward": 0.25}, step=1, commit=True)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "reward/avg_raw_reward": 0.25}
    tracker.finish()


def test_a_list_of_trackers_gets_everything(recorder, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    tracker = Tracking("p", "run", ["console", "recorder", "console"], config={"lr": 1.0}, tags=["t"])
    tracker.log({"a": 1}, step=1)
    tracker.log({"b": 2.0}, step=1, commit=True)
    tracker.finish()
    spy = tracker.backends["recorder"]
    assert list(tracker.backends) == ["console", "recorder"]
    assert spy.calls == [("log", {"a": 1}, 1, False), ("log", {"b": 2.0}, 1, True), ("finish", False)]
    assert (spy.run.project, spy.run.name, spy.run.config, spy.run.tags) == ("p", "run", {"lr": 1.0}, ["t"])
    assert "Metrics of step 1" in caplog.text and "2.0000" in caplog.text


def test_an_unknown_tracker_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"trainer\.logger='wandbb'.*tensorboard, wandb, mlflow, swanlab, trackio"):
        Tracking("p", "run", backend=["console", "wandbb"])


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "trackio"])
def test_a_missing_package_says_what_to_install(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"trainer\.logger={name} needs the package.*pip install"):
        Tracking("p", "run", backend=name)


def test_a_failure_is_recorded_once_and_finishes_the_run(recorder, tmp_path):
    tracker = Tracking("p", "run", "recorder", run_dir=str(tmp_path))
    tracker.log({"a": 1}, step=3)
    error = ValueError("boom")
    tracker.log_exception(error, step=3)
    tracker.log_exception(error, step=3)
    tracker.finish()
    spy = tracker.backends["recorder"]
    assert spy.calls[1:] == [("exception", error, 3), ("finish", True)]
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3, "a": 1}


def test_a_tracker_that_fails_itself_does_not_hide_the_run_s_error(recorder, caplog):
    tracker = Tracking("p", "run", ["recorder", "console"])
    tracker.backends["recorder"].log_exception = lambda *_: 1 / 0
    tracker.log_exception(ValueError("boom"), step=1)
    assert "recorder could not record" in caplog.text


def test_metrics_after_the_end_are_dropped_with_a_warning(recorder, caplog):
    tracker = Tracking("p", "run", "recorder")
    tracker.finish()
    tracker.log({"a": 1}, step=9, commit=True)
    assert "step 9" in caplog.text
    assert tracker.backends["recorder"].calls == [("finish", False)]


def test_tables_go_only_where_they_show(recorder):
    assert not Tracking("p", "run", "console").supports_tables
    tracker = Tracking("p", "run", ["console", "recorder"])
    assert tracker.supports_tables
    tracker.log_samples_to_table("trajectories/train", ["step", "reward"], [[1, 0.5]], step=1)
    assert tracker.backends["recorder"].calls == [("table", "trajectories/train", ["step", "reward"], [[1, 0.5]], 1)]


def test_the_console_prints_a_step_once_with_its_areas(caplog):
    caplog.set_level(logging.INFO)
    tracker = Tracking("p", "run", "console")
    tracker.log({"reward/b": np.float32(0.5), "reward/a": 1}, step=2)
    assert "Metrics of" not in caplog.text
    tracker.log({"timing/step": 12.34567, "note": "x"}, step=2, commit=True)
    assert caplog.messages == ["Metrics of step 2\n          note x\n  reward  a 1  b 0.5000\n  timing  step 12.3457"]


def test_format_of_no_metrics_is_empty():
    assert format_metrics({}) == ""


def test_tensorboard_holds_the_scalars_and_skips_the_rest(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tb"))
    tracker = Tracking("p", "run-1", "tensorboard")
    tracker.log({"reward": torch.tensor(0.5), "text": "no", "vector": np.ones(3)}, step=4, commit=True)
    tracker.log_exception(raised(ValueError("boom")), step=5)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb/run-1")).Reload()
    assert events.Tags()["scalars"] == ["reward"]
    (event,) = events.Scalars("reward")
    assert (event.step, event.value) == (4, 0.5)
    assert events.Tags()["tensors"] == ["error/traceback/text_summary"]


def fake_module(monkeypatch, name, **members):
    module = types.ModuleType(name)
    module.calls = []
    for key, value in members.items():
        setattr(module, key, value)

    def call(method):
        return lambda *args, **kwargs: module.calls.append((method, args, kwargs))

    module.__getattr__ = call
    monkeypatch.setitem(sys.modules, name, module)
    return module


class FakeWandbRun:
    def __init__(self):
        self.logged, self.exit_code = [], None

    def log(self, data, step, commit):
        self.logged.append((data, step, commit))

    def finish(self, exit_code):
        self.exit_code = exit_code


def test_wandb_gets_metrics_tables_and_the_traceback(monkeypatch):
    run, started = FakeWandbRun(), {}

    def init(**options):
        started.update(options)
        return run

    fake_module(monkeypatch, "wandb", init=init, Table=lambda columns, data: (columns, data))
    tracker = Tracking("proj", "name", "wandb", config={"a": 1}, tags=["x"])
    tracker.log({"m": 1.0}, step=1, commit=True)
    tracker.log_samples_to_table("trajectories/eval", ["a"], [["row"]], step=1)
    tracker.log_exception(raised(ValueError("boom")), step=2)
    assert {key: started[key] for key in ("project", "name", "config", "tags")} == {
        "project": "proj",
        "name": "name",
        "config": {"a": 1},
        "tags": ["x"],
    }
    assert run.logged[0] == ({"m": 1.0}, 1, True)
    assert run.logged[1] == ({"trajectories/eval": (["a"], [["row"]])}, 1, False)
    columns, ((step, kind, text),) = run.logged[2][0]["error/tracebacks"]
    assert (columns, step, kind) == (["step", "type", "traceback"], 2, "ValueError")
    assert text.endswith("ValueError: boom\n")
    assert run.exit_code == 1


def test_mlflow_gets_flat_parameters_in_small_calls_and_legal_names(monkeypatch):
    mlflow = fake_module(monkeypatch, "mlflow")
    tracker = Tracking("exp", "name", "mlflow", config={"n": {str(i): i for i in range(150)}, "long": "x" * 900})
    tracker.log({"reward/pass@8": 1, "skip": "text"}, step=3, commit=True)
    tracker.finish()
    names = [name for name, _, _ in mlflow.calls]
    assert names == ["set_experiment", "start_run", "log_params", "log_params", "log_metrics", "end_run"]
    params = {**mlflow.calls[2][1][0], **mlflow.calls[3][1][0]}
    assert len(mlflow.calls[2][1][0]) == 100 and len(params) == 151
    assert params["n/149"] == "149" and len(params["long"]) == 500
    assert mlflow.calls[4][1:] == (({"reward/pass_at_8": 1.0},), {"step": 3})
    assert mlflow.calls[5][2] == {"status": "FINISHED"}


def test_swanlab_reads_its_environment(monkeypatch):
    swanlab = fake_module(monkeypatch, "swanlab")
    monkeypatch.setenv("SWANLAB_API_KEY", "k")
    monkeypatch.setenv("SWANLAB_MODE", "local")
    tracker = Tracking("p", "n", "swanlab", config={"a": 1})
    tracker.log({"m": 1, "t": "x"}, step=2, commit=True)
    tracker.finish()
    assert swanlab.calls[0] == ("login", ("k",), {})
    assert swanlab.calls[1][2] == {
        "project": "p",
        "experiment_name": "n",
        "config": {"a": 1},
        "logdir": "swanlog",
        "mode": "local",
    }
    assert swanlab.calls[2:] == [("log", ({"m": 1},), {"step": 2}), ("finish", (), {})]


def test_trackio_gets_scalars(monkeypatch):
    trackio = fake_module(monkeypatch, "trackio")
    tracker = Tracking("p", "n", "trackio", config={"a": 1})
    tracker.log({"m": 1.5, "t": "x"}, step=2, commit=True)
    tracker.finish()
    assert trackio.calls == [
        ("init", (), {"project": "p", "name": "n", "config": {"a": 1}}),
        ("log", ({"m": 1.5},), {"step": 2}),
        ("finish", (), {}),
    ]


def test_parameters_are_flattened_with_slashes_and_list_lengths():
    config = {"data": {"train": ["a", "b"]}, "lr": 0.1, "none": None, "empty": []}
    assert flatten_params(config) == {
        "data/train/list_len": 2,
        "data/train/0": "a",
        "data/train/1": "b",
        "lr": 0.1,
        "none": None,
        "empty/list_len": 0,
    }


def test_a_long_traceback_keeps_its_end():
    text = traceback_text(raised(ValueError("x" * 20_000)))
    assert len(text) == 10_000 and text.endswith("x\n")


def test_every_documented_tracker_is_there():
    assert list(tracker_backends.TRACKERS) == ["console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"]
