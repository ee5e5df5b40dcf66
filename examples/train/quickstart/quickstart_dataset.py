"""Make the quickstart's data: additions of two numbers, no network.

    python examples/train/quickstart/quickstart_dataset.py --output_dir ~/data/quickstart

Writes train.parquet and validation.parquet. No pair of operands is in both, in either order.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ENV_CLASS = "addition"
# An empty system message keeps the chat template's own, 16 tokens longer, out of every prompt.
SYSTEM = ""


def make_rows(pairs: list[tuple[int, int]], split: str) -> list[dict[str, Any]]:
    """One row per pair, in the schema that every environment shares."""
    return [
        {
            "data_source": "quickstart/addition",
            "prompt": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"What is {a} + {b}? Answer with just the number."},
            ],
            "env_class": ENV_CLASS,
            "reward_spec": {"method": "rule", "ground_truth": str(a + b)},
            "extra_info": {"split": split, "index": index},
        }
        for index, (a, b) in enumerate(pairs)
    ]


def split_pairs(
    max_operand: int, num_validation: int, seed: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Deal all ordered pairs of 1..max_operand into training and validation, shuffled by the seed.

    The two orders of a pair go to the same side; validation holds at least ``num_validation`` pairs.
    """
    unordered = [(a, b) for a in range(1, max_operand + 1) for b in range(a, max_operand + 1)]
    rng = random.Random(seed)
    rng.shuffle(unordered)
    train: list[tuple[int, int]] = []
    validation: list[tuple[int, int]] = []
    for a, b in unordered:
        side = validation if len(validation) < num_validation else train
        side.extend([(a, b)] if a == b else [(a, b), (b, a)])
    if not train:
        raise ValueError(
            f"--num_validation={num_validation} leaves no training data; raise --max_operand={max_operand}"
        )
    rng.shuffle(train)
    return train, validation


def write_dataset(output_dir: str | Path, *, max_operand: int = 20, num_validation: int = 64, seed: int = 0) -> Path:
    """Write both files and return their directory."""
    directory = Path(output_dir).expanduser()
    directory.mkdir(parents=True, exist_ok=True)
    train, validation = split_pairs(max_operand, num_validation, seed)
    for split, pairs in (("train", train), ("validation", validation)):
        pq.write_table(pa.Table.from_pylist(make_rows(pairs, split)), directory / f"{split}.parquet")
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="~/data/quickstart")
    parser.add_argument("--max_operand", type=int, default=20)
    parser.add_argument("--num_validation", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(write_dataset(**vars(args)))


if __name__ == "__main__":
    main()
