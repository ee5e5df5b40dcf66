"""A batch of prompts as the generator works on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyrl.train.generators.collector import RolloutContext
from skyrl.train.generators.sampling import wants_logprobs
from skyrl.train.generators.start_gate import StartGate
from skyrl.types.rollout import ConversationType, TrajectoryID


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """A parsed `GeneratorInput`, and what its rollouts share. Lists have one entry per row."""

    prompts: list[ConversationType]
    env_classes: list[str]
    env_extras: list[dict[str, Any]]
    sampling_params: list[dict[str, Any]]
    trajectory_ids: list[TrajectoryID] | list[None]
    global_step: int | None
    cache_salt: str | None
    weight_version: int | None
    gate: StartGate | None

    def __post_init__(self) -> None:
        for name in ("env_classes", "env_extras", "trajectory_ids"):
            length = len(getattr(self, name))
            if length != len(self.prompts):
                raise ValueError(f"the batch has {len(self.prompts)} prompts and {length} {name}")

    @property
    def logprobs(self) -> bool:
        """Whether the rows ask for log-probs; they all agree."""
        return bool(self.sampling_params) and wants_logprobs(self.sampling_params[0])

    def context(self, row: int, attempt: int) -> RolloutContext:
        """Return the place of a try in the batch."""
        return RolloutContext(
            index=row, attempt=attempt, global_step=self.global_step, cache_salt=self.cache_salt, gate=self.gate
        )
