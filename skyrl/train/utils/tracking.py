"""Where metrics go: ``metrics.jsonl`` always, and any of the trackers on top."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.errors import ConfigError
from skyrl.train.utils.metrics_file import MetricsFile
from skyrl.train.utils.run_dir import METRICS
from skyrl.train.utils.tracker_backends import TRACKERS, TrackerBackend, TrackerRun
from skyrl.utils.plain import plain

logger = logging.getLogger(__name__)


class Tracking:
    """One logger for several trackers.

    Args:
        project_name: ``trainer.project_name``.
        experiment_name: ``trainer.run_name``.
        backend: ``trainer.logger``: one name or a list of names.
        config: settings of the run, shown by trackers that can.
        tags: ``trainer.tags`` (wandb only).
        run_dir: folder of ``metrics.jsonl``; None writes none.

    Raises:
        ConfigError: Unknown name, or a tracker whose package is not installed.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        backend: str | Sequence[str] = "console",
        config: Any = None,
        tags: Sequence[str] | None = None,
        run_dir: str | None = None,
    ) -> None:
        names = [backend] if isinstance(backend, str) else list(dict.fromkeys(backend))
        unknown = [name for name in names if name not in TRACKERS]
        if unknown:
            raise ConfigError(f"trainer.logger={unknown[0]!r} is unknown; choose from {', '.join(TRACKERS)}")
        run = TrackerRun(
            project=project_name,
            name=experiment_name,
            config=plain(config or {}),
            tags=list(tags or ()),
            directory=run_dir,
        )
        self.run_dir = run_dir
        self.metrics_path = os.path.join(run_dir, METRICS) if run_dir else None
        self._file = MetricsFile(self.metrics_path) if self.metrics_path else None
        self._finished = False
        self.backends: dict[str, TrackerBackend] = {}
        for name in names:
            self.backends[name] = _start(name, run)

    @property
    def supports_tables(self) -> bool:
        """Whether any tracker shows tables of samples."""
        return any(backend.supports_tables for backend in self.backends.values())

    def log(self, data: Mapping[str, Any], step: int, commit: bool = False) -> None:
        """Log metrics of a step. Several calls for one step belong together; the last one has ``commit``."""
        if self._finished:
            logger.warning("Metrics of step %d came after the tracker had finished; they are dropped", step)
            return
        if self._file is not None:
            self._file.log(data, step, commit)
        for backend in self.backends.values():
            backend.log(data, step, commit)

    def log_samples_to_table(
        self, key: str, columns: Sequence[str], samples: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Show rows of samples, one value per column, in the trackers that have tables."""
        for backend in self.backends.values():
            if backend.supports_tables and not self._finished:
                backend.log_table(key, columns, samples, step)

    def log_exception(self, error: BaseException, step: int) -> None:
        """Record what ended the run and finish; a second call does nothing. Never raises itself."""
        if self._finished:
            return
        self._finished = True
        for name, backend in self.backends.items():
            try:
                backend.log_exception(error, step)
                backend.finish(failed=True)
            except Exception:
                # The run's own error is what the user must see.
                logger.exception("Tracker %s could not record the failure", name)
        if self._file is not None:
            self._file.close()

    def finish(self) -> None:
        """Write what is pending and close every tracker; a second call does nothing."""
        if self._finished:
            return
        self._finished = True
        if self._file is not None:
            self._file.close()
        for backend in self.backends.values():
            backend.finish(failed=False)


def _start(name: str, run: TrackerRun) -> TrackerBackend:
    try:
        return TRACKERS[name](run)
    except ModuleNotFoundError as error:
        missing = error.name or name
        raise ConfigError(
            f"trainer.logger={name} needs the package {missing!r}, which is not installed: pip install {missing}, "
            "or use trainer.logger=console"
        ) from error
