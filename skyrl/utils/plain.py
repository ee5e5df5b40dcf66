"""Values reduced to plain types, for JSON lines, checkpoints and trackers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Config value in the types that JSON and ``torch.load(weights_only=True)`` know; unknown types become text."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return plain(value.value)
    # Exact types: a subclass of str would not pass the weights_only reader.
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def scalar(value: Any) -> float | int | None:
    """The number in a metric (Python, numpy or a one-element tensor), or None if it is no number."""
    if isinstance(value, bool | np.bool_):
        return int(value)
    if isinstance(value, int | float):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return scalar(value.item()) if value.size == 1 else None
    if hasattr(value, "item") and hasattr(value, "numel"):  # a tensor, without importing torch
        return scalar(value.item()) if value.numel() == 1 else None
    return None


def json_safe(value: Any) -> Any:
    """Value in plain JSON types: NaN and infinities become null, unknown objects their text."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    number = scalar(value)
    if number is not None:
        return number if isinstance(number, int) or math.isfinite(number) else None
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if hasattr(value, "tolist"):  # arrays and tensors
        return json_safe(value.tolist())
    return str(value)
