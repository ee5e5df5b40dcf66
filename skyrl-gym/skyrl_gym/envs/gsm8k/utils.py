"""Reward of GSM8K: the number after the answer marker."""

from __future__ import annotations

import re

_MARKED_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def extract_solution(text: str, method: str = "strict") -> str | None:
    """Find the answer in a solution.

    Args:
        text: The solution.
        method: `strict` reads the number after the first `#### `; `flexible` takes the last number of the text.

    Returns:
        The number as text, without thousands separators, or None.
    """
    assert method in ("strict", "flexible"), f"method must be 'strict' or 'flexible', not {method!r}"
    if method == "strict":
        match = _MARKED_NUMBER.search(text)
        return None if match is None else _plain(match.group(1))
    numbers = [_plain(number) for number in _NUMBER.findall(text)]
    return next((number for number in reversed(numbers) if number not in ("", ".")), None)


def compute_score(
    solution_str: str,
    ground_truth: str,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Score a solution by string equality of its answer.

    Returns:
        0 without an answer, `score` when it equals the ground truth, else `format_score`.
    """
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == str(ground_truth) else format_score


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "")
