"""Named parts of the reward as columns, `GeneratorOutput["reward_components"]`: every row has every name.

An environment names them in `metadata["rewards"]` of its steps. Training normalises them apart
(`trainer.algorithm.advantage_estimator=gdpo`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skyrl.train.generators.base import GeneratorOutput
from skyrl.types.rollout import classify_stop_reason

RewardColumns = dict[str, list[float]]


def reward_columns(parts: Sequence[Mapping[str, float]]) -> RewardColumns | None:
    """Return one column per name, in the order in which the names first appear; None when no row names any.

    A row that does not name a part has 0.0: it failed, was cut before its environment came to it, or another
    environment made it. In a group of one environment such a part has no spread and teaches nothing.

    Args:
        parts: Those of each row; nothing for a row that failed.
    """
    names = dict.fromkeys(name for row in parts for name in row)
    return {name: [row.get(name, 0.0) for row in parts] for name in names} or None


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
    """Join the columns of several batches; a batch without a part that another has gets 0.0 there."""
    columns = [output.get("reward_components") or {} for output in outputs]
    lengths = [len(output["response_ids"]) for output in outputs]
    names = dict.fromkeys(name for part in columns for name in part)
    joined = {
        name: [value for part, rows in zip(columns, lengths, strict=True) for value in part.get(name, [0.0] * rows)]
        for name in names
    }
    return joined or None
