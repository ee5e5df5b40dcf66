"""The boundary between the trainer and whatever makes rollouts.

N is the number of prompts times the samples per prompt, already expanded. M is the number of output rows;
it equals N unless a generator emits one row per turn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NotRequired

from typing_extensions import TypedDict

from skyrl.types.rollout import ConversationType, MessageType, Rollout, TrajectoryID

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = [
    "BatchMetadata",
    "ConversationType",
    "GeneratorInput",
    "GeneratorInterface",
    "GeneratorOutput",
    "MessageType",
    "MetricsOutput",
    "SamplingParamsInput",
    "TrainingPhase",
    "TrajectoryID",
]

TrainingPhase = Literal["train", "eval"]

SamplingParamsInput = dict[str, Any] | list[dict[str, Any]]
"""Parameters under the engine's own names: one dict for the batch, or one per prompt."""


@dataclass
class BatchMetadata:
    """Where a batch of prompts belongs."""

    global_step: int | None
    """Training step, from 1; None in an evaluation without training."""
    training_phase: TrainingPhase
    """`train` or `eval`."""


class GeneratorInput(TypedDict):
    """A batch of prompts, each list of length N."""

    prompts: list[ConversationType]
    env_classes: list[str]
    env_extras: NotRequired[list[dict[str, Any]] | None]
    """All other columns of the dataset row."""
    sampling_params: NotRequired[SamplingParamsInput | None]
    """None takes the configured parameters."""
    trajectory_ids: NotRequired[list[TrajectoryID] | None]
    batch_metadata: NotRequired[BatchMetadata | None]


class GeneratorOutput(TypedDict):
    """Rollouts as columns of length M; row order follows the input. Absent and None mean the same."""

    prompt_token_ids: list[list[int]]
    """Each ends with the generation prompt."""
    response_ids: list[list[int]]
    """Sampled and observation tokens."""
    rewards: list[float] | list[list[float]]
    """All numbers, or all per-token lists as long as the response."""
    loss_masks: list[list[int]]
    """1 where the policy sampled the token."""
    stop_reasons: NotRequired[list[str] | None]
    rollout_logprobs: NotRequired[list[list[float]] | None]
    """Nats, aligned with the response, 0.0 on tokens that were not sampled."""
    rollout_metrics: NotRequired[dict[str, Any] | None]
    trajectory_ids: NotRequired[list[TrajectoryID] | None]
    is_last_step: NotRequired[list[bool] | None]
    """Step-wise rows only."""
    trajectory_generation_times: NotRequired[list[float] | None]
    """Seconds."""
    trajectory_time_splits: NotRequired[dict[str, list[float]] | None]
    """Seconds by part, a dict of columns: `{"llm": [...], "env": [...]}`."""
    env_metrics: NotRequired[list[dict[str, Any]] | None]
    rollout_expert_indices: NotRequired[list[np.ndarray] | None]
    """Per row `[tokens, layers, topk]`."""
    pixel_values: NotRequired[list[torch.Tensor | None] | None]
    image_grid_thw: NotRequired[list[torch.Tensor | None] | None]
    reward_components: NotRequired[dict[str, list[float]] | None]
    """Named parts of the reward, a dict of columns: every row has every name; failed rows have 0.0."""
    baseline_scores: NotRequired[list[float] | None]
    """Score of the greedy rollout of each row's prompt; NaN where that one failed."""
    weight_versions: NotRequired[list[tuple[int, int]] | None]
    """Weight syncs the engine had received at the first and the last sampled token of the row."""
    rollouts: NotRequired[list[Rollout] | None]
    """The record of every row, for the trajectory files."""


class MetricsOutput(TypedDict):
    """Rewards of a batch in three numbers."""

    avg_score: float
    pass_at_n: float
    mean_positive_reward: float


class GeneratorInterface(ABC):
    """Makes rollouts. Subclass it to bring your own agent; nothing else of the trainer changes."""

    on_rollout_done: Callable[[], None] = staticmethod(lambda: None)
    """Set by the trainer; a generator that calls it after each rollout gets a progress line."""

    @abstractmethod
    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Roll out every prompt of the batch.

        Returns:
            Rows in the order of the input. A rollout that failed is a row with a failed stop reason
            (`skyrl.types.rollout.classify_stop_reason`) and an all-zero loss mask, never a reward of 0 that
            counts.
        """
