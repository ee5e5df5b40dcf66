"""Trajectory files: `<run_dir>/trajectories/{train,eval}-NNNNNN.jsonl`, one per global step.

A line is written only when its rollout's fate is known, and a reader never sees half of one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson
import torch

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.trajectories.record import StepContext, TrainedColumns, make_records
from skyrl.utils import storage

Rollouts = tuple[Mapping[str, Any], Mapping[str, Any], Sequence[str]]
"""`GeneratorInput`, `GeneratorOutput` and the prompt of each input row."""


def write_trajectories(
    run_dir: str,
    phase: Literal["train", "eval"],
    global_step: int,
    inputs: Mapping[str, Any],
    output: Mapping[str, Any],
    uids: Sequence[str],
    *,
    batch: TrainingInputBatch | None = None,
    aside: Sequence[Rollouts] = (),
) -> str:
    """Write the rollouts of a batch and return the path of the file.

    The file of a training step is replaced as a whole: a step that a resumed run repeats is not there twice. An
    evaluation appends, since it comes in several batches.

    Args:
        run_dir: Local folder of the run.
        phase: `train` or `eval`.
        global_step: Training step.
        inputs: The `GeneratorInput`.
        output: The `GeneratorOutput`.
        uids: Prompt of each input row.
        batch: What training made of the rows, unpadded: old log-probs and advantages go into the lines.
        aside: Rollouts of the step that were not trained on; their lines follow.

    Raises:
        OSError: The file could not be written; it holds what it held before.
    """
    context = StepContext(run=os.path.basename(os.path.normpath(run_dir)), phase=phase, global_step=global_step)
    trained = None if batch is None else trained_columns(batch, output)
    records = make_records(context, inputs, output, uids, trained)
    records += [record for part in aside for record in make_records(context, *part)]
    text = b"".join(orjson.dumps(record) + b"\n" for record in records)
    path = trajectory_path(run_dir, phase, global_step)
    if phase == "train":
        storage.write_atomic(path, text)
    else:
        _append(path, text)
    return path


def trajectory_path(run_dir: str, phase: str, global_step: int) -> str:
    """Return the path of a step's file."""
    return os.path.join(os.path.expanduser(run_dir), "trajectories", f"{phase}-{global_step:06d}.jsonl")


def trained_columns(batch: TrainingInputBatch, output: Mapping[str, Any]) -> TrainedColumns:
    """Cut old log-probs and advantages out of the right-aligned tensors `[batch, response]`."""
    lengths = [len(ids) for ids in output["response_ids"]]
    old, advantages = batch.get("action_log_probs"), batch.get("advantages")
    means = None
    if advantages is not None:
        mask = batch["loss_mask"].bool()
        sums = torch.where(mask, advantages, 0.0).sum(dim=-1)
        means = (sums / mask.sum(dim=-1).clamp(min=1)).tolist()
    return TrainedColumns(
        old_log_probs=None
        if old is None
        else [row[old.shape[1] - length :].tolist() for row, length in zip(old, lengths, strict=True)],
        advantages=means,
    )


def _append(path: str, text: bytes) -> None:
    """Append whole lines; what a failed write left is cut off again."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "ab", buffering=0) as file:
        end = file.tell()
        try:
            left = memoryview(text)
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), end)
            raise
