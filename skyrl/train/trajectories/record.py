"""One line of a trajectory file: everything that is known about a rollout, in plain JSON types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from skyrl.types.rollout import Rollout, TrajectoryID, classify_stop_reason
from skyrl.utils.plain import json_safe

VERSION = 1
LOGPROB_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What the rollouts of a file have in common."""

    run: str
    """Name of the run."""
    phase: str
    """`train` or `eval`."""
    global_step: int
    """Training step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedColumns:
    """What training made of the rows."""

    old_log_probs: list[list[float]] | None
    """Nats by the trainer before the update, aligned with each response."""
    advantages: list[float] | None
    """Mean over the trained tokens of each row."""


def make_records(
    context: StepContext,
    inputs: Mapping[str, Any],
    output: Mapping[str, Any],
    uids: Sequence[str],
    trained: TrainedColumns | None = None,
) -> list[dict[str, Any]]:
    """Return one record per output row.

    Args:
        context: Run, phase and step.
        inputs: The `GeneratorInput`.
        output: The `GeneratorOutput`; a generator of the user's own may leave `rollouts` out, and then messages,
            turns and times are null.
        uids: Prompt of each input row.
        trained: From the training batch, if there was one.
    """
    sources = _input_rows(inputs, output)
    records = []
    for row, source in enumerate(sources):
        record = _from_columns(context, inputs, output, uids, row, source)
        rollouts = output.get("rollouts")
        record |= _from_rollout(rollouts[row] if rollouts is not None else None)
        if trained is not None:
            record |= _from_training(trained, row)
        if output.get("is_last_step") is not None:
            record["step"] = row - sources.index(source)
            record["is_last_step"] = bool(output["is_last_step"][row])
        records.append(record)
    return records


def _input_rows(inputs: Mapping[str, Any], output: Mapping[str, Any]) -> list[int]:
    """Return the input row of every output row: by trajectory where the output names it, else by position."""
    ids = output.get("trajectory_ids")
    if ids is None:
        return list(range(len(output["response_ids"])))
    positions = {name: row for row, name in enumerate(inputs["trajectory_ids"])}
    return [positions[name] for name in ids]


def _from_columns(
    context: StepContext,
    inputs: Mapping[str, Any],
    output: Mapping[str, Any],
    uids: Sequence[str],
    row: int,
    source: int,
) -> dict[str, Any]:
    ids: Sequence[TrajectoryID] | None = inputs.get("trajectory_ids")
    extras = inputs.get("env_extras")
    reward, reasons = output["rewards"][row], output.get("stop_reasons")
    reason = reasons[row] if reasons is not None else None
    failed = classify_stop_reason(reason) == "failed"
    logprobs, versions = output.get("rollout_logprobs"), output.get("weight_versions")
    parts, baselines = output.get("reward_components"), output.get("baseline_scores")
    return {
        "v": VERSION,
        "run": context.run,
        "phase": context.phase,
        "global_step": context.global_step,
        "uid": uids[source],
        "instance_id": ids[source].instance_id if ids is not None else None,
        "repetition_id": ids[source].repetition_id if ids is not None else None,
        "env_class": inputs["env_classes"][source],
        "data_source": extras[source].get("data_source") if extras is not None else None,
        "prompt": json_safe(inputs["prompts"][source]),
        "prompt_token_ids": _integers(output["prompt_token_ids"][row]),
        "response_ids": _integers(output["response_ids"][row]),
        "loss_mask": _integers(output["loss_masks"][row]),
        "rollout_logprobs": _rounded(logprobs[row]) if logprobs is not None else None,
        "rewards": _reward_column(reward),
        "reward": None if failed else _total(reward),
        "reward_components": _row_of(parts, row) if parts and not failed else None,
        "baseline_score": _total(baselines[row]) if baselines is not None else None,
        "stop_reason": reason,
        "weight_version": list(versions[row]) if versions is not None else None,
        "env_metrics": json_safe(output["env_metrics"][row]) if output.get("env_metrics") else {},
    }


def _row_of(columns: Mapping[str, Sequence[float]], row: int) -> dict[str, float | None]:
    return {name: _total(column[row]) for name, column in columns.items()}


def _from_rollout(rollout: Rollout | None) -> dict[str, Any]:
    if rollout is None:
        absent = ("messages", "turns", "failure", "t_start", "t_end", "time_splits")
        return {"attempt": 1, **dict.fromkeys(absent)}
    return {
        "attempt": rollout.attempt,
        "messages": json_safe(rollout.messages),
        "turns": [json_safe(asdict(turn)) for turn in rollout.turns],
        "failure": asdict(rollout.failure) if rollout.failure is not None else None,
        "t_start": rollout.t_start,
        "t_end": rollout.t_end,
        "time_splits": json_safe(rollout.time_splits),
    }


def _from_training(trained: TrainedColumns, row: int) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    if trained.old_log_probs is not None:
        columns["old_log_probs"] = _rounded(trained.old_log_probs[row])
    if trained.advantages is not None:
        columns["advantage"] = json_safe(trained.advantages[row])
    return columns


def _integers(values: Sequence[int]) -> list[int]:
    ids: list[int] = np.asarray(values, dtype=np.int64).tolist()
    return ids


def _rounded(values: Sequence[float]) -> list[float | None]:
    numbers = np.round(np.asarray(values, dtype=np.float64), LOGPROB_DIGITS)
    if np.isfinite(numbers).all():
        return list(numbers.tolist())
    return [number if np.isfinite(number) else None for number in numbers.tolist()]


def _reward_column(reward: float | Sequence[float]) -> list[float | None] | float | None:
    if np.ndim(reward) == 0:
        return _total(reward)
    return [number if np.isfinite(number) else None for number in np.asarray(reward, dtype=np.float64).tolist()]


def _total(reward: float | Sequence[float]) -> float | None:
    total: float | None = json_safe(float(np.sum(reward)))
    return total
