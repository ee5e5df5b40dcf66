"""A batch as one safetensors file: columns as tensors, everything else as JSON in the header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from skyrl.utils import storage

_HEADER = "skyrl_batch"
_TUPLE = "__tuple__"

FileColumn = Tensor | list[Tensor] | None
"""A column of rows, a ragged one, or an absent one."""


def save(path: str, columns: Mapping[str, FileColumn], metadata: dict[str, Any]) -> None:
    """Write the file, locally under a temporary name that is then renamed; the path may be a bucket's.

    Raises:
        ValueError: The metadata holds something that JSON cannot.
    """
    lengths = {key: len(value) if isinstance(value, list) else None for key, value in columns.items()}
    kinds = {
        key: "none" if value is None else "ragged" if isinstance(value, list) else "tensor"
        for key, value in columns.items()
    }
    tensors: dict[str, Tensor] = {}
    for key, value in columns.items():
        if isinstance(value, list):
            tensors |= {f"{key}/{i}": tensor for i, tensor in enumerate(value)}
        elif value is not None:
            tensors[key] = value
    header = json.dumps({"kinds": kinds, "lengths": lengths, "metadata": _encode(metadata, "metadata")})
    # Columns may share memory (grpo's returns are its advantages), which the format refuses: clone.
    owned = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    storage.write_atomic(path, save_tensors(owned, metadata={_HEADER: header}))


def load(path: str) -> tuple[dict[str, FileColumn], dict[str, Any]]:
    """Read columns and metadata.

    Raises:
        ValueError: The file was not written by `save`.
    """
    data = storage.read_bytes(path)
    header = _header(path, data)
    stored = load_tensors(data)
    columns: dict[str, FileColumn] = {}
    for key, kind in header["kinds"].items():
        if kind == "ragged":
            columns[key] = [stored[f"{key}/{i}"] for i in range(header["lengths"][key])]
        else:
            columns[key] = stored[key] if kind == "tensor" else None
    return columns, _decode(header["metadata"])


def _header(path: str, data: bytes) -> dict[str, Any]:
    """Return our part of a safetensors header: 8 bytes of length, then JSON."""
    length = int.from_bytes(data[:8], "little")
    text = json.loads(data[8 : 8 + length]).get("__metadata__", {}).get(_HEADER)
    if text is None:
        raise ValueError(f"{path} holds no batch: its header lacks {_HEADER}")
    header: dict[str, Any] = json.loads(text)
    return header


def _encode(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        return {_TUPLE: [_encode(item, where) for item in value]}
    if isinstance(value, list):
        return [_encode(item, where) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _encode(item, f"{where}.{key}") for key, item in value.items()}
    raise ValueError(f"{where} holds a {type(value).__name__}, which a batch file cannot keep")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(_decode(item) for item in value[_TUPLE])
        return {key: _decode(item) for key, item in value.items()}
    return value
