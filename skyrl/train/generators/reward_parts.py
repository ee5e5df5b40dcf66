"""Named parts of the reward as columns, `GeneratorOutput["reward_components"]`: every row has every name.

An environment names them in `metadata["rewards"]` of its steps. Training normalises them apart
(`trainer.algorithm.advantage_estimator=gdpo`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from skyrl.errors import RolloutError
from skyrl.train.generators.base import GeneratorOutput
from skyrl.train.generators.metrics import valid_rows
from skyrl.types.rollout import classify_stop_reason

RewardColumns = dict[str, list[float]]


class RowParts(NamedTuple):
    """The parts of one row's reward, and whether they are all there."""

    parts: Mapping[str, float]
    failed: bool
    """The row is no sample."""
    complete: bool
    """The environment ended the episode. One that was cut before may lack parts that come with the end."""


def reward_columns(rows: Sequence[RowParts]) -> RewardColumns | None:
    """Return one column per name, in the order in which the names first appear; None when no row names any.

    Failed rows get 0.0, and so does a row that was cut before its environment had named a part.

    Raises:
        RolloutError: Two rows that are complete name different parts, or a cut one names a part that no complete
            row has.
    """
    complete = [row for row, parts in enumerate(rows) if parts.complete and not parts.failed]
    cut = [row for row, parts in enumerate(rows) if not parts.complete and not parts.failed]
    reference = complete[0] if complete else None
    if reference is not None:
        names = list(rows[reference].parts)
        for row in complete:
            _require_names(rows, row, reference, agree=set(rows[row].parts) == set(names))
        for row in cut:
            _require_names(rows, row, reference, agree=set(rows[row].parts) <= set(names))
    else:
        names = list(dict.fromkeys(name for row in cut for name in rows[row].parts))
    if not names:
        return None
    return {name: [0.0 if row.failed else row.parts.get(name, 0.0) for row in rows] for name in names}


def _require_names(rows: Sequence[RowParts], row: int, reference: int, *, agree: bool) -> None:
    if not agree:
        raise RolloutError(
            f"row {row} names the rewards {sorted(rows[row].parts)}, row {reference} names "
            f"{sorted(rows[reference].parts)}: environments must put the same names into metadata['rewards'] of all "
            "rollouts of a batch, with 0.0 where a part does not apply"
        )


def zero_parts_on_non_stop(columns: RewardColumns | None, stop_reasons: Sequence[str]) -> RewardColumns | None:
    """Return columns that are 0.0 for truncated and failed rows; the input stays as it is."""
    if columns is None:
        return None
    finished = [classify_stop_reason(reason) == "finished" for reason in stop_reasons]
    return {
        name: [value if kept else 0.0 for value, kept in zip(column, finished, strict=True)]
        for name, column in columns.items()
    }


def join_reward_columns(outputs: Sequence[GeneratorOutput]) -> RewardColumns | None:
    """Join the columns of several batches; a batch of which every row failed may lack them.

    Raises:
        RolloutError: Two batches name different parts.
    """
    columns = [output.get("reward_components") for output in outputs]
    lengths = [len(output["response_ids"]) for output in outputs]
    sampled = [
        part
        for part, output in enumerate(outputs)
        if columns[part] or valid_rows(output.get("stop_reasons"), lengths[part])
    ]
    named = [sorted(columns[part] or {}) for part in sampled]
    for part, names in zip(sampled, named, strict=True):
        if names != named[0]:
            raise RolloutError(
                f"batch {part} names the rewards {names}, batch {sampled[0]} names {named[0]}: environments must put "
                "the same names into metadata['rewards'] of all rollouts"
            )
    first = columns[sampled[0]] if sampled else None
    if not first:
        return None
    return {
        name: [value for column, length in zip(columns, lengths, strict=True) for value in _part(column, name, length)]
        for name in first
    }


def _part(columns: RewardColumns | None, name: str, length: int) -> Sequence[float]:
    return columns[name] if columns else [0.0] * length
