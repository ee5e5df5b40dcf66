r"""Multiplication over several turns: a model answers in ``\boxed{}`` and may try again."""

from __future__ import annotations

import re
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

DEFAULT_MAX_TURNS = 5
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")

WRONG = r"That is not the product. Check your steps and give a new answer in \boxed{}."
NO_BOX = r"I see no answer in \boxed{}. Put the final number there, as in \boxed{42}."


def parse_answer(text: str) -> str | None:
    r"""Return what stands in the last ``\boxed{...}``, without blanks and commas; None without a box."""
    boxes = _BOXED.findall(text)
    return re.sub(r"[\s,]", "", boxes[-1]) if boxes else None


class MultiplyEnv(BaseTextEnv):
    r"""Ends at the first right answer, or after ``max_turns``.

    Reward, on the last turn only: 1.0 for the right number in the box, 0.5 for another one, 0.0 without a box.
    Reads ``extras["reward_spec"]["ground_truth"]`` and ``extras["max_turns"]`` (5).
    """

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        row = extras or {}
        assert row.get("reward_spec") is not None, "reward_spec field is required"
        assert "ground_truth" in row["reward_spec"], "ground_truth is required in reward_spec field"
        self.ground_truth = str(row["reward_spec"]["ground_truth"])
        self.max_turns = int(row.get("max_turns") or DEFAULT_MAX_TURNS)
        self.solved = False

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Read the box; answer with advice, or end the episode with its reward."""
        self.turns += 1
        answer = parse_answer(action)
        self.solved = answer == self.ground_truth
        metadata = {"parsed_answer": answer}
        if self.solved or self.turns >= self.max_turns:
            reward = 1.0 if self.solved else 0.5 if answer is not None else 0.0
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata=metadata)
        advice = [{"role": "user", "content": NO_BOX if answer is None else WRONG}]
        return BaseTextEnvStepOutput(observations=advice, reward=0.0, done=False, metadata=metadata)

    def get_metrics(self) -> dict[str, Any]:
        """Share of solved episodes and number of turns."""
        return {"solved": float(self.solved), "turns": self.turns}
