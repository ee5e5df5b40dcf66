"""One question, one number: the environment of the quickstart."""

from __future__ import annotations

import re
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_THOUSANDS_COMMA = re.compile(r"(?<=\d),(?=\d{3}\b)")


def last_number(text: str) -> str | None:
    """Return the last number in the text as it is written, without commas between thousands; None if there is none."""
    numbers = _NUMBER.findall(_THOUSANDS_COMMA.sub("", text))
    return numbers[-1] if numbers else None


class AdditionEnv(BaseTextEnv):
    """One turn: reward 1.0 when the last number of the answer is the ground truth, else 0.0.

    Reads ``extras["reward_spec"]["ground_truth"]``.
    """

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        row = extras or {}
        assert row.get("reward_spec") is not None, "reward_spec field is required"
        assert "ground_truth" in row["reward_spec"], "ground_truth is required in reward_spec field"
        self.ground_truth = str(row["reward_spec"]["ground_truth"])
        self.correct = False
        self.answered = False

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Score the answer and end the episode."""
        number = last_number(action)
        self.answered = number is not None
        self.correct = number == self.ground_truth
        metadata = {"parsed_answer": number}
        return BaseTextEnvStepOutput(observations=[], reward=float(self.correct), done=True, metadata=metadata)

    def get_metrics(self) -> dict[str, Any]:
        """Whether the answer holds a number at all, and whether it is right."""
        return {"answered": float(self.answered), "correct": float(self.correct)}
