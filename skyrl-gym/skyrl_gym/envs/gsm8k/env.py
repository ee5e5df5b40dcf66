"""Grade-school maths word problems, one answer each."""

from __future__ import annotations

from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.gsm8k.utils import compute_score


class GSM8kEnv(BaseTextEnv):
    """One turn: reward 1.0 when the number after `#### ` equals the ground truth, else 0.0.

    Reads `extras["reward_spec"]["ground_truth"]`.
    """

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        row = extras or {}
        assert row.get("reward_spec") is not None, "reward_spec field is required"
        assert "ground_truth" in row["reward_spec"], "ground_truth is required in reward_spec field"
        self.ground_truth = str(row["reward_spec"]["ground_truth"])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Score the answer and end the episode."""
        reward = compute_score(action, self.ground_truth)
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
