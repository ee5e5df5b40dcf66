"""Dynamic sampling: a step goes on sampling until its batch is full of groups that teach something.

`filter` collects good groups over several batches of the data loader; `replace` puts copies of good groups in the
place of the others of one batch. What a group must have to be good is in `skyrl.algorithms.group_filters`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from skyrl.algorithms.group_filters import GroupSpread, Selection, group_spread, replace_flat, select_good
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.config.rules.choices import require_choice
from skyrl.errors import DynamicSamplingError
from skyrl.train.generators.base import GeneratorOutput, TrajectoryID
from skyrl.train.generators.columns import concatenate_generator_outputs, slice_generator_output
from skyrl.train.stages.rolled_out import RolledOut, join_parts, slice_rollouts
from skyrl.train.stages.shaping import row_scores, valid_mask
from skyrl.utils.seeds import derive_seed

logger = logging.getLogger(__name__)

_KEY = "trainer.algorithm.dynamic_sampling"


def in_epoch(prompts: list[dict[str, Any]], epoch: int) -> list[dict[str, Any]]:
    """Prefix the uids with the epoch: a step that goes on into another epoch may meet a prompt twice."""
    return [{**item, "uid": f"epoch{epoch}:{item['uid']}"} for item in prompts]


def judge(rolled: RolledOut) -> GroupSpread:
    """Measure how far the rewards of each group lie apart; failed rollouts are no samples of it.

    Raises:
        ValueError: A reward is NaN or infinite; names the row.
    """
    return group_spread(row_scores(rolled.output), valid_mask(rolled.output), rolled.uids)


class DynamicSampler:
    """Holds what a step has sampled so far; empty between steps.

    Args:
        algorithm: Returns the current `trainer.algorithm`.
        seed: `trainer.seed`.
    """

    def __init__(self, algorithm: Callable[[], AlgorithmConfig], seed: int) -> None:
        self._algorithm = algorithm
        self._seed = seed
        self._parts: list[RolledOut] = []
        self._groups: list[GroupSpread] = []

    @property
    def is_on(self) -> bool:
        """Whether a step may take several batches."""
        return self._algorithm().dynamic_sampling.type is not None

    def add(self, rolled: RolledOut, *, num_prompts: int, global_step: int) -> RolledOut | None:
        """Take a batch of rollouts.

        Args:
            rolled: The rollouts of each prompt together.
            num_prompts: Groups of a full batch; `replace` keeps as many as `rolled` has.
            global_step: Seeds the draw of `replace`.

        Returns:
            The batch to train on, with everything that was sampled for it as `measured` and what it leaves out
            `aside`; None when more rollouts are needed.

        Raises:
            DynamicSamplingError: `max_sample_batches` batches did not give a full one.
            ValueError: A reward is NaN or infinite.
        """
        if not self.is_on:
            return rolled
        self._parts.append(rolled)
        self._groups.append(judge(rolled))
        selection = self._select(num_prompts, global_step)
        if selection is None:
            self._check_limit(num_prompts)
            logger.info("Step %d samples on after batch %d: %s", global_step, len(self._parts), self.found(num_prompts))
            return None
        metrics = {
            "generate/num_sample_batches": float(len(self._parts)),
            "generate/good_group_share": float(self._good().double().mean()),
        }
        measured = self.drain()
        assert measured is not None
        return _selected(measured, selection, metrics)

    def drain(self) -> RolledOut | None:
        """Return what was collected and forget it; None when there is nothing."""
        parts, self._parts, self._groups = self._parts, [], []
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else join_parts(parts)

    def found(self, num_prompts: int) -> str:
        """Say what the step has so far."""
        settings = self._algorithm().dynamic_sampling
        if settings.type == "replace":
            last = self._groups[-1].is_good(self._tol)
            return (
                f"{int(last.sum())} of the {len(last)} groups of the last batch are good, and their share must be "
                f"above min_replace_ratio={settings.min_replace_ratio:g}"
            )
        good = self._good()
        return f"{int(good.sum())} of {len(good)} groups are good, and {num_prompts} are needed"

    @property
    def _tol(self) -> float:
        return self._algorithm().zero_variance_filter_tol

    def _good(self) -> torch.Tensor:
        return GroupSpread.join(self._groups).is_good(self._tol)

    def _select(self, num_prompts: int, global_step: int) -> Selection | None:
        """Choose rows of all parts put together, or None."""
        settings = self._algorithm().dynamic_sampling
        if settings.type == "filter":
            if int(self._good().sum()) < num_prompts:
                return None
            uids = [uid for part in self._parts for uid in part.uids]
            return select_good(GroupSpread.join(self._groups), uids, tol=self._tol, limit=num_prompts)
        seed = derive_seed(self._seed, "replace", global_step, len(self._parts))
        last = replace_flat(
            self._groups[-1], self._parts[-1].uids, tol=self._tol, min_ratio=settings.min_replace_ratio, seed=seed
        )
        before = sum(len(part.uids) for part in self._parts[:-1])
        return None if last is None else replace(last, rows=[before + row for row in last.rows])

    def _check_limit(self, num_prompts: int) -> None:
        limit = self._algorithm().dynamic_sampling.max_sample_batches
        if not 0 < limit <= len(self._parts):
            return
        scores = torch.cat([row_scores(part.output)[valid_mask(part.output)] for part in self._parts])
        mean = f"the mean reward is {float(scores.mean()):.4g}" if len(scores) else "every rollout failed"
        raise DynamicSamplingError(
            f"{_KEY}.max_sample_batches={limit}: {len(self._parts)} batches are sampled and {self.found(num_prompts)} "
            f"({mean}). A group is good when its rewards differ by more than zero_variance_filter_tol={self._tol:g}. "
            "Take prompts that are neither too hard nor too easy for the model, raise "
            "generator.n_samples_per_prompt, lower trainer.train_batch_size, raise the limit (-1 means none), or set "
            f"{_KEY}.type=null"
        )


def handle_dynamic_sampling(
    generator_output: GeneratorOutput,
    uids: list[str],
    sampling_config: Mapping[str, Any],
    collected_state: Mapping[str, Any] | None = None,
) -> tuple[GeneratorOutput, list[str], bool, dict[str, Any] | None]:
    """Select rows of one batch after another, in upstream's form: for loops that keep the state by themselves.

    Args:
        generator_output: The columns of one batch, the rollouts of each prompt together.
        uids: Their uids; no uid may come back in a later batch.
        sampling_config: `type` (None, `filter`, `replace`); `train_batch_size` in prompts for `filter`,
            `min_replace_ratio` for `replace`; optionally `tol` and `seed`.
        collected_state: What the call for the batch before returned; it stays as it is.

    Returns:
        Columns and uids to train on, False, and None; or the batch itself, True for more sampling, and the state to
        hand to the next call.

    Raises:
        ConfigError: The type has no such name.
        ValueError: A reward is NaN or infinite, there is not one uid a row, or a uid comes back.
    """
    require_choice(f"{_KEY}.type", sampling_config.get("type"), (None, "filter", "replace"))
    kind, tol = sampling_config.get("type"), sampling_config.get("tol", 1e-6)
    if kind is None:
        return generator_output, uids, False, None
    state = dict(collected_state or {})
    groups = group_spread(row_scores(generator_output), valid_mask(generator_output), uids)
    if kind == "replace":
        ratio, seed = sampling_config["min_replace_ratio"], sampling_config.get("seed", 0)
        chosen = replace_flat(groups, uids, tol=tol, min_ratio=ratio, seed=seed)
        if chosen is None:
            return generator_output, uids, True, state
        return slice_generator_output(generator_output, chosen.rows), chosen.uids, False, None
    chosen = select_good(groups, uids, tol=tol)
    twice = set(state.get("collected_uids", ())) & set(chosen.uids)
    if twice:
        raise ValueError(
            f"uid {min(map(str, twice))!r} was collected from an earlier batch, and its rollouts would become one "
            "group with those; put the epoch into the uids"
        )
    if chosen.rows:
        parts = [state.get("collected_generator_output"), slice_generator_output(generator_output, chosen.rows)]
        state["collected_generator_output"] = concatenate_generator_outputs([part for part in parts if part])
        state["collected_uids"] = [*state.get("collected_uids", ()), *chosen.uids]
    collected = state.get("collected_uids", [])
    state["num_prompts_in_batch"] = len(dict.fromkeys(collected))
    if state["num_prompts_in_batch"] < sampling_config["train_batch_size"]:
        return generator_output, uids, True, state
    kept = set(list(dict.fromkeys(collected))[: sampling_config["train_batch_size"]])
    rows = [row for row, uid in enumerate(collected) if uid in kept]
    output = slice_generator_output(state["collected_generator_output"], rows)
    return output, [collected[row] for row in rows], False, None


def _selected(measured: RolledOut, selection: Selection, metrics: dict[str, float]) -> RolledOut:
    """Cut the rows to train on out of everything that was sampled; copies get names of their own."""
    chosen = slice_rollouts(measured, selection.rows)
    copies = [None if uid == old else uid for uid, old in zip(selection.uids, chosen.uids, strict=True)]
    inputs: Any = {**chosen.inputs, "trajectory_ids": _renamed(chosen.inputs.get("trajectory_ids"), copies)}
    output: Any = dict(chosen.output)
    if output.get("trajectory_ids") is not None:
        output["trajectory_ids"] = _renamed(output["trajectory_ids"], copies)
    taken = set(selection.rows)
    left = [row for row in range(len(measured.uids)) if row not in taken]
    dropped = (slice_rollouts(measured, left),) if left else ()
    return RolledOut(
        inputs=inputs,
        output=output,
        uids=selection.uids,
        metrics=measured.metrics | metrics,
        measured=measured,
        aside=(*measured.aside, *dropped),
    )


def _renamed(ids: list[TrajectoryID] | None, uids: list[str | None]) -> list[TrajectoryID] | None:
    if ids is None:
        return None
    return [name if uid is None else TrajectoryID(uid, name.repetition_id) for name, uid in zip(ids, uids, strict=True)]
