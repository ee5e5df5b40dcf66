"""What one rollout is: the conversation, its tokens, how it ended and what it cost.

A `Rollout` is made by the generator and read by the trajectory files; training itself uses the
token columns of `GeneratorOutput`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

MessageType = dict[str, Any]
"""One chat message: `{"role": "user", "content": "..."}`."""

ConversationType = list[MessageType]
"""Chat messages in order."""

StopClass = Literal["finished", "truncated", "failed"]

FINISHED_REASONS = frozenset({"stop", "eos", "complete", "tool_calls"})
"""The policy ended its answer by itself."""

TRUNCATED_REASONS = frozenset({"length", "max_tokens", "context_length"})
"""A limit ended the answer."""

FAILED_REASONS = frozenset({"error", "abort", "timeout", "agent_timeout"})
"""Something broke: the row is no sample of the policy."""


def classify_stop_reason(reason: str | None) -> StopClass:
    """Say what a stop reason means for training.

    Args:
        reason: The word of the engine or of a custom generator. None means that the generator reports no
            reasons, which counts as finished.

    Returns:
        `finished`, `truncated` or `failed`. A word that nobody knows is `truncated`: nothing says that the
        answer is complete, and nothing says that it is broken.
    """
    if reason is None or reason in FINISHED_REASONS:
        return "finished"
    return "failed" if reason in FAILED_REASONS else "truncated"


@dataclass(frozen=True)
class TrajectoryID:
    """Which rollout of which prompt: `TrajectoryID("17", 3)` is the fourth rollout of prompt 17."""

    instance_id: str
    """The prompt's uid."""
    repetition_id: int
    """Index within the group, from 0."""

    def to_string(self) -> str:
        """Return `<instance>_<repetition>`, the session id of the rollout."""
        return f"{self.instance_id}_{self.repetition_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call of a rollout and the environment step after it."""

    prompt_len: int
    """Tokens in the prompt of this call."""
    n_sampled: int
    """Tokens that the engine sampled."""
    stop_reason: str
    """Why the call ended, in the engine's word."""
    reward: float
    """Reward of the environment step; 0.0 where the step did not happen."""
    t_llm: float
    """Seconds that the engine took."""
    t_env: float
    """Seconds that the environment took, waiting for a thread included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rollout failed."""

    type: str
    """Class name of the exception."""
    message: str
    """Its text."""
    where: str
    """The step that raised: `env.make`, `env.init`, `render`, `engine`, `env.step`, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """All turns of one trajectory, as the trajectory files record it.

    Lengths: `response_ids`, `loss_mask`, `rollout_logprobs` and per-token `rewards` agree.

    Example: `Rollout(trajectory_id=TrajectoryID("17", 3), env_class="gsm8k", prompt=[...], ...)`.
    """

    trajectory_id: TrajectoryID | None
    """None when the caller gave no ids."""
    env_class: str
    """Registered name of the environment."""
    prompt: ConversationType
    """The messages of the dataset row."""
    messages: ConversationType
    """The whole conversation: what the environment made of the prompt, and every turn after it."""
    prompt_token_ids: list[int]
    """Tokens of the first call, ending with the generation prompt."""
    response_ids: list[int]
    """Sampled and observation tokens after the prompt."""
    loss_mask: list[int]
    """1 where the policy sampled the token."""
    rollout_logprobs: list[float] | None
    """Log-probs in nats of the sampled tokens, 0.0 elsewhere; None when not asked for."""
    rewards: list[float] | float
    """Per token, or one number."""
    stop_reason: str
    """See `classify_stop_reason`."""
    turns: tuple[Turn, ...] = ()
    """One entry per model call."""
    failure: Failure | None = None
    """Set exactly when the rollout failed."""
    attempt: int = 1
    """Which try this is, from 1."""
    weight_version: tuple[int, int] | None = None
    """Weight syncs the engine had received at the first and the last sampled token; None when unknown."""
    t_start: float = 0.0
    """Unix time in seconds at which the try began."""
    t_end: float = 0.0
    """Unix time in seconds at which it ended."""
    time_splits: dict[str, float] = field(default_factory=dict)
    """Seconds by part: `llm`, `env`."""
    env_metrics: dict[str, Any] = field(default_factory=dict)
    """What the environment reported at the end."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, summed over the steps."""
