"""The rows that rollouts become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl.train.generators.agent_loop import Episode
from skyrl.train.generators.base import GeneratorOutput
from skyrl.train.generators.reward_parts import reward_columns
from skyrl.types.rollout import ConversationType, Failure, Rollout, TrajectoryID, classify_stop_reason


@dataclass(kw_only=True)
class TrajectoryOutput:
    """One finished rollout, as `_post_process_agent_loop_output` sees it."""

    response_ids: list[int]
    """Sampled and observation tokens."""
    reward: list[float] | float
    """Per token, or one number."""
    stop_reason: str
    """Why it ended."""
    loss_mask: list[int]
    """1 on sampled tokens."""
    prompt_ids: list[int]
    """Tokens of the first call."""
    rollout_logprobs: list[float] | None = None
    """Nats, aligned with the response; None when not asked for."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, summed over the steps."""
    env_metrics: dict[str, Any] = field(default_factory=dict)
    """From the environment."""
    episode: Episode = field(default_factory=Episode)
    """Messages, turns, times."""
    failure: Failure | None = None
    """Set exactly when the rollout failed."""
    attempt: int = 1
    """Which try this is."""
    t_start: float = 0.0
    """Unix time in seconds."""
    t_end: float = 0.0
    """Unix time in seconds."""


@dataclass(kw_only=True)
class StepWiseOutput:
    """The rows of one rollout that gives a row per turn. `SkyRLGymGenerator` makes none yet."""

    step_outputs: list[TrajectoryOutput]
    """In turn order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStyle:
    """What the rows of a batch agree on."""

    scalar_rewards: bool
    """One number per row instead of one per token."""
    logprobs: bool
    """Whether rows carry log-probs."""
    pad_token_id: int
    """Stands for a response or a prompt that does not exist."""


def finished_row(episode: Episode, style: RowStyle) -> TrajectoryOutput:
    """Turn a finished episode into a row; a prompt beyond the limit becomes a masked placeholder."""
    if episode.prompt_too_long:
        return placeholder_row(episode, style, stop_reason="length")
    assert episode.transcript is not None, "a finished episode has a transcript"
    rewards = episode.transcript.token_rewards
    return TrajectoryOutput(
        response_ids=episode.transcript.response_ids,
        reward=sum(rewards) if style.scalar_rewards else rewards,
        stop_reason=episode.stop_reason,
        loss_mask=episode.transcript.loss_mask,
        prompt_ids=episode.transcript.prompt_ids,
        rollout_logprobs=episode.transcript.rollout_logprobs if style.logprobs else None,
        reward_parts=dict(episode.reward_parts),
        env_metrics=episode.env_metrics,
        episode=episode,
    )


def placeholder_row(episode: Episode, style: RowStyle, *, stop_reason: str) -> TrajectoryOutput:
    """Return a row that trains nothing: the prompt as far as it was rendered, and one pad token."""
    prompt_ids = episode.transcript.prompt_ids if episode.transcript is not None else []
    return TrajectoryOutput(
        response_ids=[style.pad_token_id],
        reward=0.0 if style.scalar_rewards else [0.0],
        stop_reason=stop_reason,
        loss_mask=[0],
        prompt_ids=prompt_ids or [style.pad_token_id],
        rollout_logprobs=[0.0] if style.logprobs else None,
        episode=episode,
    )


def rollout_record(
    output: TrajectoryOutput, *, prompt: ConversationType, env_class: str, trajectory_id: TrajectoryID | None
) -> Rollout:
    """Return the record of a row."""
    return Rollout(
        trajectory_id=trajectory_id,
        env_class=env_class,
        prompt=prompt,
        messages=output.episode.messages or prompt,
        prompt_token_ids=output.prompt_ids,
        response_ids=output.response_ids,
        loss_mask=output.loss_mask,
        rollout_logprobs=output.rollout_logprobs,
        rewards=output.reward,
        stop_reason=output.stop_reason,
        turns=tuple(output.episode.turns),
        failure=output.failure,
        attempt=output.attempt,
        weight_version=output.episode.weight_version,
        t_start=output.t_start,
        t_end=output.t_end,
        time_splits={"llm": output.episode.llm_s, "env": output.episode.env_s},
        env_metrics=output.env_metrics,
        reward_parts=output.reward_parts,
    )


def _reward_parts(output: TrajectoryOutput) -> Mapping[str, float]:
    return {} if classify_stop_reason(output.stop_reason) == "failed" else output.reward_parts


def to_columns(
    outputs: Sequence[TrajectoryOutput],
    rollouts: Sequence[Rollout],
    *,
    logprobs: bool,
    weight_version: int | None,
) -> GeneratorOutput:
    """Return the rows as columns, without metrics.

    Args:
        outputs: The rows.
        rollouts: Their records.
        logprobs: Whether the rows carry log-probs.
        weight_version: Of the engine when the batch began; stands for rows without a model call.
    """
    fallback = None if weight_version is None else (weight_version, weight_version)
    versions = [rollout.weight_version or fallback for rollout in rollouts]
    known = [version for version in versions if version is not None]
    return GeneratorOutput(
        prompt_token_ids=[output.prompt_ids for output in outputs],
        response_ids=[output.response_ids for output in outputs],
        rewards=[output.reward for output in outputs],  # type: ignore[typeddict-item]
        loss_masks=[output.loss_mask for output in outputs],
        stop_reasons=[output.stop_reason for output in outputs],
        rollout_logprobs=[output.rollout_logprobs or [] for output in outputs] if logprobs else None,
        trajectory_ids=None,
        is_last_step=None,
        trajectory_generation_times=[output.t_end - output.t_start for output in outputs],
        trajectory_time_splits={
            "llm": [rollout.time_splits["llm"] for rollout in rollouts],
            "env": [rollout.time_splits["env"] for rollout in rollouts],
        },
        env_metrics=[output.env_metrics for output in outputs],
        rollout_expert_indices=None,
        reward_components=reward_columns([_reward_parts(output) for output in outputs]),
        weight_versions=known if len(known) == len(versions) else None,
        rollouts=list(rollouts),
    )
