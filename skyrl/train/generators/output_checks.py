"""What a generator's output must satisfy before the trainer uses it."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Sized
from typing import Any

import numpy as np

from skyrl.train.generators.base import GeneratorOutput, TrajectoryID
from skyrl.train.generators.metrics import valid_rows
from skyrl.train.generators.rewards import is_scalar

logger = logging.getLogger(__name__)

_COLUMNS = (
    "prompt_token_ids",
    "loss_masks",
    "rewards",
    "rollout_logprobs",
    "stop_reasons",
    "trajectory_ids",
    "rollout_expert_indices",
    "is_last_step",
    "pixel_values",
    "image_grid_thw",
    "trajectory_generation_times",
    "env_metrics",
    "weight_versions",
    "rollouts",
    "baseline_scores",
)

MAX_LOGPROB = 1e-3
"""Log-probs are at most 0; rounding may push them this far above."""


def validate_generator_output(num_prompts: int, output: GeneratorOutput, step_wise: bool = False) -> None:
    """Check the columns against each other.

    Args:
        num_prompts: Rows that were asked for.
        output: The columns.
        step_wise: Rows are turns: there may be more than prompts, grouped by trajectory.

    Raises:
        RuntimeError: There are no rows.
        AssertionError: A column or a row contradicts another; the text names it.
    """
    responses = output["response_ids"]
    num_rows = len(responses)
    if num_rows == 0:
        raise RuntimeError("the generator returned no rollouts")
    if not step_wise:
        _require(num_rows == num_prompts, f"the generator returned {num_rows} rows for {num_prompts} prompts")
    for name in _COLUMNS:
        column: Any = output.get(name)
        if column is not None:
            _require(len(column) == num_rows, f"{name} has {len(column)} rows, response_ids has {num_rows}")
    scalar = [is_scalar(reward) for reward in output["rewards"]]
    _require(all(scalar) or not any(scalar), "rewards mixes numbers and per-token lists")
    for row in range(num_rows):
        _check_row(output, row)
    _check_reward_columns(output, num_rows)
    if not any(any(mask) for mask in output["loss_masks"]):
        logger.warning("all loss masks are zero: this batch trains nothing")
    if step_wise:
        _check_steps(output, num_rows)


def _check_row(output: GeneratorOutput, row: int) -> None:
    length = len(output["response_ids"][row])
    mask, reward = output["loss_masks"][row], output["rewards"][row]
    _require(len(mask) == length, f"row {row}: loss_masks has {len(mask)} entries, response_ids has {length}")
    if not is_scalar(reward):
        is_list = isinstance(reward, Sized) and not isinstance(reward, str)
        _require(is_list, f"row {row}: rewards is {reward!r}, neither a number nor a list of numbers")
        _require(len(reward) == length, f"row {row}: rewards has {len(reward)} entries, response_ids has {length}")
    _require(len(output["prompt_token_ids"][row]) > 0, f"row {row}: prompt_token_ids is empty")
    for name in ("prompt_token_ids", "response_ids"):
        _check_token_ids(output[name][row], f"row {row}: {name}")
    logprobs = output.get("rollout_logprobs")
    if logprobs is None:
        return
    values = np.asarray(logprobs[row], dtype=np.float64)
    _require(len(values) == length, f"row {row}: rollout_logprobs has {len(values)} entries, response_ids has {length}")
    _require(not np.isnan(values).any(), f"row {row}: rollout_logprobs holds NaN")
    _require(
        not (values > MAX_LOGPROB).any(), f"row {row}: rollout_logprobs holds {values.max(initial=0)}, greater than 0"
    )


def _check_reward_columns(output: GeneratorOutput, num_rows: int) -> None:
    baselines, parts = output.get("baseline_scores"), output.get("reward_components")
    if baselines is not None:
        _require(not np.isinf(np.asarray(baselines, dtype=np.float64)).any(), "baseline_scores holds an infinite score")
    if parts is None:
        return
    valid = valid_rows(output.get("stop_reasons"), num_rows)
    for name, column in parts.items():
        _require(
            len(column) == num_rows,
            f"reward_components[{name!r}] has {len(column)} rows, response_ids has {num_rows}",
        )
        values = np.asarray(column, dtype=np.float64)
        for row in valid:
            _require(np.isfinite(values[row]), f"row {row}: reward_components[{name!r}] is {values[row]}")


def _check_token_ids(ids: Sequence[int], name: str) -> None:
    values = np.asarray(ids)
    if values.size == 0:
        return
    _require(values.dtype.kind in "iu", f"{name} holds something else than integers")
    _require(int(values.min()) >= 0, f"{name} holds the token id {values.min()}")


def _check_steps(output: GeneratorOutput, num_rows: int) -> None:
    last, ids = output.get("is_last_step"), output.get("trajectory_ids")
    if last is None or ids is None:
        raise AssertionError("step-wise rows need is_last_step and trajectory_ids")
    _require(bool(last[-1]), "is_last_step of the last row must be True")
    seen: set[TrajectoryID] = set()
    for row in range(num_rows):
        _require(ids[row] not in seen, f"row {row}: trajectory {ids[row].to_string()} appears again after another one")
        ends = row + 1 == num_rows or ids[row + 1] != ids[row]
        _require(bool(last[row]) == ends, f"row {row}: is_last_step is {last[row]}, but the trajectory ends: {ends}")
        if ends:
            seen.add(ids[row])


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
