"""What a trip through the generator gave, and how such results are cut and joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyrl.train.generators.base import GeneratorInput, GeneratorOutput
from skyrl.train.generators.columns import concatenate_generator_outputs, slice_generator_output

_INPUT_COLUMNS = ("prompts", "env_classes", "env_extras", "trajectory_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledOut:
    """Rollouts that the trainer goes on with, and those that it only looks at."""

    inputs: GeneratorInput
    """What was asked for."""
    output: GeneratorOutput
    """One row per rollout, without `rollout_metrics`."""
    uids: list[str]
    """The prompt's uid of every row."""
    metrics: dict[str, Any]
    """`generate/*` and `environment/*` of all rows that were sampled."""
    measured: RolledOut | None = None
    """All rows that were sampled for the step, where `output` is a selection of them; None means the same rows."""
    aside: tuple[RolledOut, ...] = ()
    """Rollouts that are recorded and not trained on: greedy baselines, groups that were dropped."""


def slice_input(inputs: GeneratorInput, rows: Sequence[int]) -> GeneratorInput:
    """Return the rows of a generator input, in the order given."""
    sliced: dict[str, Any] = dict(inputs)
    for key in _INPUT_COLUMNS:
        if sliced.get(key) is not None:
            sliced[key] = [sliced[key][row] for row in rows]
    sampling = sliced.get("sampling_params")
    if isinstance(sampling, list):
        sliced["sampling_params"] = [sampling[row] for row in rows]
    return sliced  # type: ignore[return-value]


def slice_rollouts(rolled: RolledOut, rows: Sequence[int]) -> RolledOut:
    """Return some rows; the metrics stay those of all, and what lay aside is left behind."""
    return RolledOut(
        inputs=slice_input(rolled.inputs, rows),
        output=slice_generator_output(rolled.output, rows),
        uids=[rolled.uids[row] for row in rows],
        metrics=rolled.metrics,
    )


def join_parts(parts: Sequence[RolledOut]) -> RolledOut:
    """Put batches together; their metrics are computed again over all rows."""
    outputs: list[GeneratorOutput] = [{**part.output, "rollout_metrics": part.metrics} for part in parts]
    columns: dict[str, Any] = dict(concatenate_generator_outputs(outputs))
    metrics = columns.pop("rollout_metrics", None) or {}
    return RolledOut(
        inputs=join_inputs([part.inputs for part in parts]),
        output=columns,  # type: ignore[arg-type]
        uids=[uid for part in parts for uid in part.uids],
        metrics=metrics,
        aside=tuple(rolled for part in parts for rolled in part.aside),
    )


def join_inputs(parts: Sequence[GeneratorInput]) -> GeneratorInput:
    """Put generator inputs together; what is no list of rows is that of the first part."""
    asked: list[dict[str, Any]] = [dict(part) for part in parts]
    inputs = dict(asked[0])
    for key in _INPUT_COLUMNS:
        if inputs.get(key) is not None:
            inputs[key] = [item for part in asked for item in part[key]]
    if isinstance(inputs.get("sampling_params"), list):
        inputs["sampling_params"] = [item for part in asked for item in part["sampling_params"]]
    return inputs  # type: ignore[return-value]
