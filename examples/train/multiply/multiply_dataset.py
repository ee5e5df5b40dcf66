r"""Make products of two n-digit numbers, no network.

    python examples/train/multiply/multiply_dataset.py --output_dir ~/data/multiply --num_digits 2

Writes train.parquet and validation.parquet. ``--num_shots`` puts solved examples first: a very small model
copies the ``\boxed{}`` format from them.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ENV_CLASS = "multiply"
SYSTEM = r"You multiply whole numbers. Write the final number in \boxed{}."


def make_prompt(a: int, b: int, shots: list[tuple[int, int]]) -> list[dict[str, str]]:
    """System message, solved examples as earlier turns, and the question."""
    messages = [{"role": "system", "content": SYSTEM}]
    for x, y in shots:
        messages += [
            {"role": "user", "content": f"What is {x} * {y}?"},
            {"role": "assistant", "content": f"\\boxed{{{x * y}}}"},
        ]
    return [*messages, {"role": "user", "content": f"What is {a} * {b}?"}]


def make_rows(
    count: int, split: str, *, num_digits: int, num_shots: int, max_turns: int, seed: int
) -> list[dict[str, Any]]:
    """``count`` rows with operands of exactly ``num_digits`` digits, drawn by the seed and the split's name."""
    rng = random.Random(f"{split}-{seed}")
    low, high = 10 ** (num_digits - 1), 10**num_digits - 1

    def pair() -> tuple[int, int]:
        return rng.randint(max(low, 2), high), rng.randint(max(low, 2), high)

    rows = []
    for index in range(count):
        a, b = pair()
        rows.append(
            {
                "data_source": "synthetic/multiply",
                "prompt": make_prompt(a, b, [pair() for _ in range(num_shots)]),
                "env_class": ENV_CLASS,
                "reward_spec": {"method": "rule", "ground_truth": str(a * b)},
                "max_turns": max_turns,
                "extra_info": {"split": split, "index": index, "num_digits": num_digits},
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="~/data/multiply")
    parser.add_argument("--num_digits", type=int, default=2)
    parser.add_argument("--num_shots", type=int, default=0)
    parser.add_argument("--max_turns", type=int, default=5)
    parser.add_argument("--train_size", type=int, default=10_000)
    parser.add_argument("--validation_size", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    directory = Path(args.output_dir).expanduser()
    directory.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", args.train_size), ("validation", args.validation_size)):
        rows = make_rows(
            count,
            split,
            num_digits=args.num_digits,
            num_shots=args.num_shots,
            max_turns=args.max_turns,
            seed=args.seed,
        )
        pq.write_table(pa.Table.from_pylist(rows), directory / f"{split}.parquet")
    print(directory)


if __name__ == "__main__":
    main()
