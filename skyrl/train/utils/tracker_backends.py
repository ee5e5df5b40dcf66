"""One small class per tracker; each imports its package when it starts."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl.utils.plain import scalar

logger = logging.getLogger(__name__)

_TRACEBACK_CHARS = 10_000
_MLFLOW_PARAM_CHARS = 500
_MLFLOW_PARAMS_A_CALL = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerRun:
    """What a tracker is told about the run, e.g. ``TrackerRun(project="skyrl", name="gsm8k", ...)``."""

    project: str
    """Group of runs."""
    name: str
    """Name of this run."""
    config: dict[str, Any]
    """Settings in plain types."""
    tags: list[str]
    """Labels; wandb only."""
    directory: str | None
    """Local folder of the run; None if it has none."""


class TrackerBackend:
    """Base of the trackers; a tracker overrides what it can show."""

    supports_tables = False
    """Whether `log_table` shows anything."""

    def log(self, data: Mapping[str, Any], step: int, commit: bool) -> None:
        """Record metrics of a step; ``commit`` ends the step."""
        raise NotImplementedError

    def log_table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Show rows of samples."""

    def log_exception(self, error: BaseException, step: int) -> None:
        """Record what ended the run."""

    def finish(self, failed: bool) -> None:
        """Close the run."""


class ConsoleTracker(TrackerBackend):
    """One log record a step: a line per area (the part before the slash), floats with 4 decimals."""

    def __init__(self, run: TrackerRun) -> None:
        self._step: int | None = None
        self._pending: dict[str, Any] = {}

    def log(self, data: Mapping[str, Any], step: int, commit: bool) -> None:
        """Collect the values of a step and print them when it ends."""
        if self._step is not None and step != self._step:
            self._flush()
        self._step = step
        self._pending.update(data)
        if commit:
            self._flush()

    def finish(self, failed: bool) -> None:
        """Print what is pending."""
        self._flush()

    def _flush(self) -> None:
        if self._step is not None:
            logger.info("Metrics of step %d\n%s", self._step, format_metrics(self._pending))
        self._step, self._pending = None, {}


class TensorboardTracker(TrackerBackend):
    """Event files below ``TENSORBOARD_DIR`` (``tensorboard_log``), one folder per run."""

    def __init__(self, run: TrackerRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = os.path.join(os.environ.get("TENSORBOARD_DIR", "tensorboard_log"), run.name)
        logger.info("TensorBoard files are in %s", directory)
        self._writer = SummaryWriter(directory)

    def log(self, data: Mapping[str, Any], step: int, commit: bool) -> None:
        """Write the scalars."""
        for key, value in _scalars(data):
            self._writer.add_scalar(key, value, step)
        if commit:
            self._writer.flush()

    def log_exception(self, error: BaseException, step: int) -> None:
        """Write the traceback as text."""
        self._writer.add_text("error/traceback", f"```\n{traceback_text(error)}\n```", step)

    def finish(self, failed: bool) -> None:
        """Close the files."""
        self._writer.close()


class WandbTracker(TrackerBackend):
    """Weights & Biases."""

    supports_tables = True

    def __init__(self, run: TrackerRun) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=run.project, name=run.name, config=run.config, tags=run.tags or None, dir=run.directory
        )

    def log(self, data: Mapping[str, Any], step: int, commit: bool) -> None:
        """Send the metrics."""
        self._run.log(dict(data), step=step, commit=commit)

    def log_table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Send the rows as a table of this step."""
        table = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({key: table}, step=step, commit=False)

    def log_exception(self, error: BaseException, step: int) -> None:
        """Send a table with the step, the type and the end of the traceback."""
        self.log_table(
            "error/tracebacks",
            ("step", "type", "traceback"),
            [(step, type(error).__name__, traceback_text(error))],
            step,
        )

    def finish(self, failed: bool) -> None:
        """End the run."""
        self._run.finish(exit_code=1 if failed else 0)


class MlflowTracker(TrackerBackend):
    """MLflow: the project is its experiment; the server comes from ``MLFLOW_TRACKING_URI``."""

    def __init__(self, run: TrackerRun) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(run.project)
        mlflow.start_run(run_name=run.name)
        params = {key: str(value)[:_MLFLOW_PARAM_CHARS] for key, value in flatten_params(run.config).items()}
        keys = list(params)
        for start in range(0, len(keys), _MLFLOW_PARAMS_A_CALL):
            mlflow.log_params({key: params[key] for key in keys[start : start + _MLFLOW_PARAMS_A_CALL]})

    def log(self, data: Mapping[str, Any], step: int, commit: bool) -> None:
        """Send the scalars; MLflow allows no ``@`` in a name."""
        self._mlflow.log_metrics({key.replace("@", "_at_"): float(value) for key, value in _scalars(data)}, step=step)

    def log_exception(self, error: BaseException, step: int) -> None:
        """Attach the traceback as a file."""
        self._mlflow.log_text(traceback_text(error), f"error/traceback_step_{step}.txt")

    def finish(self, failed: bool) -> None:
        """End the run."""
        self._mlflow.end_run(status="FAILED" if failed else "FINISHED")


class SwanlabTracker(TrackerBackend):
    """SwanLab: ``SWANLAB_API_KEY``, ``SWANLAB_LOG_DIR`` (swanlog), ``SWANLAB_MODE`` (cloud)."""

    def __init__(self, run: TrackerRun) -> None:
        import swanlab

        self._swanlab = swanlab
        if key := os.environ.get("SWANLAB_API_KEY"):
            swanlab.login(key)
        swanlab.init(
            project=run.project,
            experiment_name=run.name,
            config=run.config,
            logdir=os.environ.get("SWANLAB_LOG_DIR", "swanlog"),
            mode=os.environ.get("SWANLAB_MODE", "cloud"),
        )

    def log(self, data: Mapping[str, Any], step: int, commit: bool) -> None:
        """Send the scalars."""
        self._swanlab.log(dict(_scalars(data)), step=step)

    def finish(self, failed: bool) -> None:
        """End the run."""
        self._swanlab.finish()


class TrackioTracker(TrackerBackend):
    """Trackio: local dashboard without an account."""

    def __init__(self, run: TrackerRun) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(project=run.project, name=run.name, config=run.config)

    def log(self, data: Mapping[str, Any], step: int, commit: bool) -> None:
        """Store the scalars."""
        self._trackio.log(dict(_scalars(data)), step=step)

    def finish(self, failed: bool) -> None:
        """End the run."""
        self._trackio.finish()


TRACKERS: dict[str, Callable[[TrackerRun], TrackerBackend]] = {
    "console": ConsoleTracker,
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "swanlab": SwanlabTracker,
    "trackio": TrackioTracker,
}
"""Values of ``trainer.logger``."""


def format_metrics(data: Mapping[str, Any]) -> str:
    """Metrics for people: a line per area, names sorted, floats with 4 decimals."""
    areas: dict[str, list[str]] = {}
    for key in sorted(data):
        area, _, name = key.rpartition("/")
        value = scalar(data[key])
        shown = f"{value:.4f}" if isinstance(value, float) else str(data[key] if value is None else value)
        areas.setdefault(area, []).append(f"{name} {shown}")
    width = max((len(area) for area in areas), default=0)
    return "\n".join(f"  {area:<{width}}  {'  '.join(items)}" for area, items in areas.items())


def traceback_text(error: BaseException) -> str:
    """The last 10 000 characters of an exception's traceback."""
    return "".join(traceback.format_exception(error))[-_TRACEBACK_CHARS:]


def flatten_params(config: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings as one level: keys joined by ``/``, list items by index, plus ``<key>/list_len``."""
    return dict(_flatten(config, ""))


def _flatten(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{prefix}/{key}" if prefix else str(key))
    elif isinstance(value, list | tuple):
        yield f"{prefix}/list_len", len(value)
        for index, item in enumerate(value):
            yield from _flatten(item, f"{prefix}/{index}")
    else:
        yield prefix, value


def _scalars(data: Mapping[str, Any]) -> Iterator[tuple[str, float | int]]:
    for key, value in data.items():
        number = scalar(value)
        if number is not None:
            yield key, number
