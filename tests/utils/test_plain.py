"""Numbers are found in what metrics hold; everything else becomes JSON or text."""

import json
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pytest
import torch

from skyrl.utils.plain import json_safe, plain, scalar


class Mode(StrEnum):
    LATEST = "latest"


@dataclass
class Point:
    path: str
    step: int


def test_plain_turns_enums_paths_and_dataclasses_into_json_types(tmp_path):
    value = {"mode": Mode.LATEST, "path": tmp_path, "point": Point("p", 1), 3: (1, None, 2.5)}
    expected = {"mode": "latest", "path": str(tmp_path), "point": {"path": "p", "step": 1}, "3": [1, None, 2.5]}
    assert plain(value) == expected
    assert type(plain(value)["mode"]) is str


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (2, 2),
        (True, 1),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.array([4.0]), 4.0),
        (torch.tensor(1.5), 1.5),
        (torch.tensor([7]), 7),
        (torch.ones(2), None),
        (np.ones(2), None),
        ("1", None),
        (None, None),
        ([1.0], None),
    ],
)
def test_scalar_finds_the_number(value, number):
    assert scalar(value) == number


def test_json_safe_values_survive_a_strict_encoder():
    value = {
        "nan": float("nan"),
        "inf": np.float64("inf"),
        "array": np.array([1.0, np.nan]),
        "tensor": torch.tensor(2.0),
        "tensors": torch.tensor([[1, 2]]),
        "bytes": b"\xff",
        "nested": [{"a": (1, None)}],
        5: True,
        "flag": np.bool_(False),
    }
    assert json.loads(json.dumps(json_safe(value), allow_nan=False)) == {
        "nan": None,
        "inf": None,
        "array": [1.0, None],
        "tensor": 2.0,
        "tensors": [[1, 2]],
        "bytes": "b'\\xff'",
        "nested": [{"a": [1, None]}],
        "5": True,
        "flag": False,
    }
