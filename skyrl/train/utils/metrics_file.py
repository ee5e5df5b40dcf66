"""``metrics.jsonl``: one JSON object a step, readable while the run goes on and after a crash."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from skyrl.utils.plain import json_safe


class MetricsFile:
    """Appends to ``metrics.jsonl``. Values logged for one step without ``commit`` are merged into its line.

    A resumed run appends, so a step that was repeated has two lines: `read_metrics` merges them.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._step: int | None = None
        self._pending: dict[str, Any] = {}
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._end_torn_line()

    def log(self, data: Mapping[str, Any], step: int, commit: bool = False) -> None:
        """Add values to the line of ``step``, and write it if ``commit``; a pending other step is written first."""
        if self._step is not None and self._step != step:
            self.flush()
        self._step = step
        self._pending.update(data)
        if commit:
            self.flush()

    def flush(self) -> None:
        """Write the pending line, in one call, so that a reader sees all of it or none."""
        if self._step is None:
            return
        line = json.dumps({"step": self._step, **json_safe(self._pending)}, allow_nan=False)
        self._step, self._pending = None, {}
        _write_all(self._file, (line + "\n").encode())

    def close(self) -> None:
        """Write what is pending and close the file; a second call does nothing."""
        if self._file >= 0:
            self.flush()
            os.close(self._file)
            self._file = -1

    def _end_torn_line(self) -> None:
        """A crash may have cut the last line: start on a new one."""
        with open(self.path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size == 0:
                return
            file.seek(size - 1)
            torn = file.read(1) != b"\n"
        if torn:
            _write_all(self._file, b"\n")


def read_metrics(path: str) -> list[dict[str, Any]]:
    """Lines of a metrics file by rising step; a repeated step is merged, later values winning; torn lines are skipped.

    Raises:
        FileNotFoundError: There is no such file.
    """
    by_step: dict[int, dict[str, Any]] = {}
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                by_step.setdefault(row["step"], {}).update(row)
    return [by_step[step] for step in sorted(by_step)]


def _write_all(handle: int, content: bytes) -> None:
    while content:
        content = content[os.write(handle, content) :]
