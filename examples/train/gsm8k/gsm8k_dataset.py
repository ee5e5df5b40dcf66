"""Prepare grade-school word problems: GSM8K from the hub, or small ones made here without network.

    python examples/train/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
    python examples/train/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k_cpu --made_here

Writes train.parquet and validation.parquet for the environment ``gsm8k``: the answer is the number after ``####``.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

INSTRUCTION = 'Reason step by step, then give the final number after "####".'
SHORT_INSTRUCTION = 'Give the number after "####".'

# Name, verb, things: the parts of the problems that are made here.
NAMES = ("Ana", "Ben", "Chen", "Dora", "Emil", "Fatou", "Goran", "Hana")
THINGS = ("apples", "books", "coins", "eggs", "pens", "shells", "stamps", "toys")


def make_row(messages: list[dict[str, str]], answer: str, source: str, split: str, index: int) -> dict[str, Any]:
    """One row in the schema that every environment shares."""
    return {
        "data_source": source,
        "prompt": messages,
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index},
    }


def final_number(solution: str) -> str:
    """The number after ``####`` of a reference solution, without commas.

    Raises:
        ValueError: The solution has no such marker.
    """
    _, marker, number = solution.rpartition("####")
    if not marker:
        raise ValueError(f"no #### in the reference solution {solution!r}")
    return number.strip().replace(",", "")


def hub_rows(split: str) -> list[dict[str, Any]]:
    """Rows of the hub's openai/gsm8k; ends the program with advice when the hub cannot be reached."""
    from datasets import load_dataset

    try:
        data = load_dataset("openai/gsm8k", "main", split=split)
    except Exception as error:
        raise SystemExit(
            f"Could not load openai/gsm8k ({type(error).__name__}: {error}).\n"
            "It needs network access to the hub, or a copy in the local cache (HF_HOME). "
            "Without either, --made_here writes a small dataset of the same shape."
        ) from error
    return [
        make_row(
            [{"role": "user", "content": f"{example['question']} {INSTRUCTION}"}],
            final_number(example["answer"]),
            "openai/gsm8k",
            split,
            index,
        )
        for index, example in enumerate(data)
    ]


def word_problem(rng: random.Random, largest: int) -> tuple[str, int]:
    """A question with one addition or subtraction, and its answer."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b = rng.randint(2, largest), rng.randint(1, largest)
    if rng.random() < 0.5:
        return f"{name} has {a} {thing} and finds {b} more. How many {thing} does {name} have?", a + b
    a, b = max(a, b), min(a, b)
    return f"{name} has {a} {thing} and gives away {b}. How many {thing} are left?", a - b


def made_rows(count: int, split: str, *, num_shots: int, largest: int, seed: int) -> list[dict[str, Any]]:
    """Rows with ``num_shots`` solved problems as earlier turns: a very small model copies the format from them."""
    rng = random.Random(f"{split}-{seed}")
    rows = []
    for index in range(count):
        messages = [{"role": "system", "content": SHORT_INSTRUCTION}]
        for _ in range(num_shots):
            question, answer = word_problem(rng, largest)
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": f"#### {answer}"}]
        question, answer = word_problem(rng, largest)
        messages.append({"role": "user", "content": question})
        rows.append(make_row(messages, str(answer), "made_here/word_problems", split, index))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="~/data/gsm8k")
    parser.add_argument("--made_here", action="store_true", help="make small problems instead of downloading")
    parser.add_argument("--train_size", type=int, default=512, help="with --made_here")
    parser.add_argument("--validation_size", type=int, default=64, help="with --made_here")
    parser.add_argument("--num_shots", type=int, default=2, help="with --made_here")
    parser.add_argument("--largest", type=int, default=9, help="with --made_here: largest number in a question")
    parser.add_argument("--seed", type=int, default=0, help="with --made_here")
    args = parser.parse_args()
    if args.made_here:
        sizes = {"train": args.train_size, "validation": args.validation_size}
        options = {"num_shots": args.num_shots, "largest": args.largest, "seed": args.seed}
        tables = {split: made_rows(size, split, **options) for split, size in sizes.items()}
    else:
        tables = {"train": hub_rows("train"), "validation": hub_rows("test")}
    directory = Path(args.output_dir).expanduser()
    directory.mkdir(parents=True, exist_ok=True)
    for split, rows in tables.items():
        pq.write_table(pa.Table.from_pylist(rows), directory / f"{split}.parquet")
    print(directory)


if __name__ == "__main__":
    sys.exit(main())
