"""Numbers about a batch of rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from skyrl.train.generators.base import GeneratorOutput, MetricsOutput
from skyrl.train.generators.rewards import is_scalar, total_reward
from skyrl.types.rollout import classify_stop_reason
from skyrl_gym.metrics import aggregate_for_environment

Rewards = Sequence[float] | Sequence[Sequence[float]]


def valid_rows(stop_reasons: Sequence[str] | None, num_rows: int) -> list[int]:
    """Return the rows that are samples of the policy: those that did not fail."""
    if stop_reasons is None:
        return list(range(num_rows))
    return [row for row, reason in enumerate(stop_reasons) if classify_stop_reason(reason) != "failed"]


def get_metrics_from_generator_output(output: GeneratorOutput, uids: Sequence[str]) -> MetricsOutput:
    """Return mean reward, share of solved prompts and mean positive reward.

    A rollout passes when its reward is greater than 0; with per-token rewards, the one on the last trained token
    counts (without masks, on the last token), so that rewards of earlier turns do not pass. Failed rollouts count
    nowhere; when all failed, everything is 0.

    Raises:
        ValueError: There are no rewards, or a per-token list is empty.
    """
    rewards = output["rewards"]
    if not rewards:
        raise ValueError("there are no rewards")
    if any(not is_scalar(reward) and len(reward) == 0 for reward in rewards):
        raise ValueError("a per-token reward list is empty")
    rows = valid_rows(output.get("stop_reasons"), len(rewards))
    if not rows:
        return MetricsOutput(avg_score=0.0, pass_at_n=0.0, mean_positive_reward=0.0)
    masks = output.get("loss_masks")
    passed: dict[str, bool] = {}
    for row in rows:
        mask = masks[row] if masks is not None else None
        passed[uids[row]] = passed.get(uids[row], False) or _final_reward(rewards[row], mask) > 0
    return MetricsOutput(
        avg_score=float(np.mean([total_reward(rewards[row]) for row in rows])),
        pass_at_n=sum(passed.values()) / len(passed),
        mean_positive_reward=float(np.mean([np.maximum(rewards[row], 0).sum() for row in rows])),
    )


def _final_reward(reward: float | Sequence[float], mask: Sequence[int] | None) -> float:
    if is_scalar(reward):
        return float(reward)
    trained = np.flatnonzero(mask) if mask is not None else np.array([], dtype=int)
    return float(reward[int(trained[-1])] if trained.size else reward[-1])


def compute_turn_token_counts(loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """Return the lengths of all runs of trained tokens: `[[1, 1, 0, 1], [0]]` gives `[2, 1]`."""
    return [len(list(run)) for mask in loss_masks for trained, run in groupby(mask, key=bool) if trained]


def get_rollout_metrics(
    responses: Sequence[Sequence[int]],
    rewards: Rewards,
    env_metrics: Sequence[Mapping[str, Any]] | None = None,
    env_classes: Sequence[str] | None = None,
    loss_masks: Sequence[Sequence[int]] | None = None,
    trajectory_completion_times: Sequence[float] | None = None,
    trajectory_time_splits: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, Any]:
    """Return `generate/*` and `environment/*` of a batch.

    Args:
        responses: Token ids.
        rewards: Raw, before any filter.
        env_metrics: Per rollout; aggregated by the rules of its environment.
        env_classes: Per rollout; needed for `env_metrics`.
        loss_masks: Before any filter.
        trajectory_completion_times: Seconds, one per trajectory.
        trajectory_time_splits: Seconds by part, one per trajectory; what they leave over is `other`.
    """
    lengths = np.array([len(response) for response in responses], dtype=float)
    totals = np.array([total_reward(reward) for reward in rewards])
    metrics: dict[str, Any] = {}
    if lengths.size:
        metrics |= _spread("generate/{}_num_tokens", lengths)
        metrics["generate/avg_tokens_non_zero_rewards"] = _mean(lengths[totals > 0])
        metrics["generate/avg_tokens_zero_rewards"] = _mean(lengths[totals == 0])
    if loss_masks:
        metrics |= _mask_metrics(loss_masks)
    if trajectory_completion_times:
        metrics |= _time_metrics(trajectory_completion_times, trajectory_time_splits or {})
    if env_metrics and env_classes:
        metrics |= _env_metrics(env_metrics, env_classes)
    return metrics


def _mask_metrics(loss_masks: Sequence[Sequence[int]]) -> dict[str, float]:
    trained = np.array([sum(map(bool, mask)) for mask in loss_masks], dtype=float)
    metrics = _spread("generate/{}_assistant_tokens", trained)
    turns = np.array(compute_turn_token_counts(loss_masks), dtype=float)
    metrics["generate/tokens_per_turn_mean"] = _mean(turns)
    metrics["generate/tokens_per_turn_std"] = float(turns.std()) if turns.size else 0.0
    metrics["generate/tokens_per_turn_max"] = float(turns.max()) if turns.size else 0.0
    return metrics


def _time_metrics(completion: Sequence[float], splits: Mapping[str, Sequence[float]]) -> dict[str, float]:
    parts = {"completion": np.asarray(completion, dtype=float)}
    parts |= {name: np.asarray(values, dtype=float) for name, values in splits.items()}
    if splits:
        parts["other"] = parts["completion"] - sum(parts[name] for name in splits)
    metrics = {}
    for name, values in parts.items():
        metrics[f"generate/trajectory_time_{name}_mean"] = float(values.mean())
        metrics[f"generate/trajectory_time_{name}_p90"] = float(np.percentile(values, 90))
        metrics[f"generate/trajectory_time_{name}_max"] = float(values.max())
    return metrics


def _env_metrics(env_metrics: Sequence[Mapping[str, Any]], env_classes: Sequence[str]) -> dict[str, Any]:
    by_class: dict[str, list[dict[str, Any]]] = {}
    for env_class, episode in zip(env_classes, env_metrics, strict=True):
        by_class.setdefault(env_class, []).append(dict(episode))
    metrics: dict[str, Any] = {}
    for env_class, episodes in by_class.items():
        reported = [episode for episode in episodes if episode]
        if not reported:
            continue
        for key, value in aggregate_for_environment(env_class, reported).items():
            metrics[f"environment/{key}"] = value
            if len(by_class) > 1:
                metrics[f"environment/{env_class}/{key}"] = value
    return metrics


def _spread(pattern: str, values: np.ndarray) -> dict[str, float]:
    statistics = {"min": values.min(), "max": values.max(), "avg": values.mean(), "std": values.std()}
    return {pattern.format(name): float(value) for name, value in statistics.items()}


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0
