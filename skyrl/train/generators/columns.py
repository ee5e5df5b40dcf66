"""Cutting, joining and merging the columns of `GeneratorOutput`."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

from skyrl.train.generators.base import GeneratorOutput
from skyrl.train.generators.metrics import get_rollout_metrics, valid_rows
from skyrl.train.generators.output_checks import validate_generator_output
from skyrl.train.generators.reward_parts import join_reward_columns

_DICTS_OF_COLUMNS = ("trajectory_time_splits", "reward_components")
_OF_THE_BATCH = ("rollout_metrics",)
_COMPUTED = (*_OF_THE_BATCH, "reward_components")
_REQUIRED = ("prompt_token_ids", "response_ids", "rewards", "loss_masks")


def slice_generator_output(
    output: GeneratorOutput, indices: Sequence[int], *, preserve_metrics: bool = True
) -> GeneratorOutput:
    """Return the rows at `indices`, in that order.

    Args:
        output: The columns.
        indices: Rows to keep; at least one.
        preserve_metrics: Keep `rollout_metrics`, which are those of the whole batch; else drop them.
    """
    if not indices:
        raise AssertionError("indices must not be empty")
    num_rows = len(output["response_ids"])
    sliced: dict[str, Any] = {}
    for key, value in output.items():
        if key in _OF_THE_BATCH:
            sliced[key] = value if preserve_metrics else None
        elif key in _DICTS_OF_COLUMNS and isinstance(value, dict):
            sliced[key] = {name: [column[row] for row in indices] for name, column in value.items()}
        elif isinstance(value, list) and len(value) == num_rows:
            sliced[key] = [value[row] for row in indices]
        else:
            sliced[key] = value
    return sliced  # type: ignore[return-value]


def concatenate_generator_outputs(outputs: Sequence[GeneratorOutput], step_wise: bool = False) -> GeneratorOutput:
    """Join batches.

    Optional columns survive where every part has them. Metrics that follow from the rows are computed anew; others
    are joined by name: `min`, `max`, a mean weighted by rows (names with `avg`, `mean`, and all of
    `environment/`), else the sum.

    Raises:
        ValueError: Some parts have log-probs and some do not.
        AssertionError: The result is no valid output, or there are no parts.
    """
    if not outputs:
        raise AssertionError("there is nothing to concatenate")
    if len({output.get("rollout_logprobs") is None for output in outputs}) > 1:
        raise ValueError("some generator outputs have rollout_logprobs and some have none")
    joined: dict[str, Any] = {}
    for key in outputs[0]:
        if key not in _COMPUTED:
            joined[key] = _joined_column(key, [output.get(key) for output in outputs])
    joined["reward_components"] = join_reward_columns(outputs)
    joined["rollout_metrics"] = _joined_metrics(outputs, joined)
    result: GeneratorOutput = joined  # type: ignore[assignment]
    validate_generator_output(len(result["response_ids"]), result, step_wise=step_wise)
    return result


def _joined_column(key: str, parts: Sequence[Any]) -> Any:
    if any(part is None for part in parts):
        return None
    if key in _DICTS_OF_COLUMNS:
        names = [name for name in parts[0] if all(name in part for part in parts)]
        return {name: [value for part in parts for value in part[name]] for name in names}
    if all(isinstance(part, list) for part in parts):
        return [value for part in parts for value in part]
    return parts[0]


def _joined_metrics(outputs: Sequence[GeneratorOutput], joined: dict[str, Any]) -> dict[str, Any]:
    reported = [(output.get("rollout_metrics") or {}, len(output["response_ids"])) for output in outputs]
    names = list(dict.fromkeys(name for metrics, _ in reported for name in metrics))
    merged: dict[str, Any] = {}
    for name in names:
        parts = [(metrics[name], weight) for metrics, weight in reported if isinstance(metrics.get(name), Real)]
        if parts:
            merged[name] = _reduce(name, [float(value) for value, _ in parts], [weight for _, weight in parts])
    return merged | recomputed_metrics(joined)  # type: ignore[arg-type]


def recomputed_metrics(output: GeneratorOutput) -> dict[str, Any]:
    """Return the rollout metrics that follow from the rows; failed rows are left out.

    Rewards and loss masks are those of the records, where there are any: filters change the columns.
    """
    rows = valid_rows(output.get("stop_reasons"), len(output["response_ids"]))
    last = output.get("is_last_step")
    trajectories = [row for row in rows if last is None or last[row]]
    times, splits = output.get("trajectory_generation_times"), output.get("trajectory_time_splits")
    env_metrics, rollouts = output.get("env_metrics"), output.get("rollouts")
    with_env = env_metrics is not None and rollouts is not None
    rewards = output["rewards"] if rollouts is None else [rollout.rewards for rollout in rollouts]
    masks = output["loss_masks"] if rollouts is None else [rollout.loss_mask for rollout in rollouts]
    return get_rollout_metrics(
        responses=[output["response_ids"][row] for row in rows],
        rewards=[rewards[row] for row in rows],  # type: ignore[arg-type]
        env_metrics=[env_metrics[row] for row in trajectories] if with_env and env_metrics else None,
        env_classes=[rollouts[row].env_class for row in trajectories] if with_env and rollouts else None,
        loss_masks=[masks[row] for row in rows],
        trajectory_completion_times=[times[row] for row in trajectories] if times is not None else None,
        trajectory_time_splits=(
            {name: [column[row] for row in trajectories] for name, column in splits.items()} if splits else None
        ),
    )


def _reduce(name: str, values: Sequence[float], weights: Sequence[int]) -> float:
    leaf = name.rsplit("/", 1)[-1]
    if "min" in leaf.split("_"):
        return min(values)
    if "max" in leaf.split("_"):
        return max(values)
    if name.startswith("environment/") or "avg" in leaf or "mean" in leaf:
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
    return sum(values)
