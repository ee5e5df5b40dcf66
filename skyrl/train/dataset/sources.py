"""Rows of data files and hub data sets, by number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow
import pyarrow.parquet

from skyrl.errors import DatasetError
from skyrl.utils import storage

FILE_SUFFIXES = (".parquet", ".json", ".jsonl")

MISSING = object()
"""Stands for a value that a row does not have (None is a value)."""


class Source(Protocol):
    """Rows from one place."""

    @property
    def name(self) -> str:
        """Path or hub name, for messages."""
        ...

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def row(self, index: int) -> dict[str, Any]:
        """Return a row as a dict of its own."""
        ...

    def column(self, key: str) -> Sequence[Any]:
        """Return one value per row, `MISSING` where a row has none."""
        ...


class TableSource:
    """Rows of an Arrow table, turned into Python objects when they are asked for."""

    def __init__(self, name: str, table: pyarrow.Table) -> None:
        self.name = name
        self._table = table.combine_chunks()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> dict[str, Any]:
        """See `Source`."""
        row: dict[str, Any] = self._table.slice(index, 1).to_pylist()[0]
        return row

    def column(self, key: str) -> Sequence[Any]:
        """See `Source`."""
        if key not in self._table.column_names:
            return [MISSING] * len(self)
        values: list[Any] = self._table.column(key).to_pylist()
        return values


class ListSource:
    """Rows of a JSON file."""

    def __init__(self, name: str, rows: Sequence[Any]) -> None:
        self.name = name
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict):
                raise DatasetError(f"{name}, row {number}: must be an object, not {type(row).__name__}")
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """See `Source`."""
        return dict(self._rows[index])

    def column(self, key: str) -> Sequence[Any]:
        """See `Source`."""
        return [row.get(key, MISSING) for row in self._rows]


def open_source(name: str) -> Source:
    """Open a data file by its suffix, else a hub data set `name` or `name:split`.

    Raises:
        DatasetError: It does not exist, can't be read, or has no such split.
    """
    if not name.endswith(FILE_SUFFIXES):
        return _open_hub(name)
    if not storage.exists(name):
        raise DatasetError(f"data file {name} does not exist; check data.train_data and data.val_data")
    return _open_parquet(name) if name.endswith(".parquet") else _open_json(name)


def _open_parquet(name: str) -> Source:
    try:
        with storage.open_file(name) as file:
            return TableSource(name, pyarrow.parquet.read_table(file))
    except (pyarrow.ArrowInvalid, OSError) as cause:
        raise DatasetError(f"{name} can't be read as parquet: {cause}") from cause


def _open_json(name: str) -> Source:
    with storage.open_file(name) as file:
        try:
            text = file.read().decode("utf-8")
        except UnicodeDecodeError as cause:
            raise DatasetError(f"{name} is not UTF-8 text: {cause}") from cause
    if text.lstrip().startswith("["):
        try:
            return ListSource(name, json.loads(text))
        except json.JSONDecodeError as cause:
            raise DatasetError(f"{name} is not valid JSON: {cause}") from cause
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as cause:
            raise DatasetError(f"{name}, line {number}: not valid JSON: {cause}") from cause
    return ListSource(name, rows)


def _open_hub(name: str) -> Source:
    import datasets  # takes seconds, and data files don't need it

    hub_name, _, split = name.partition(":")
    try:
        loaded = datasets.load_dataset(hub_name)
    except Exception as cause:
        raise DatasetError(
            f"{name} is neither a file ({', '.join(FILE_SUFFIXES)}) nor a data set that the hub gives: {cause}"
        ) from cause
    split = split or "train"
    if split not in loaded:
        raise DatasetError(f"{hub_name} has no split {split!r}; it has {sorted(loaded)}")
    chosen = loaded[split].with_format(None)
    return TableSource(name, chosen.flatten_indices().data.table)
