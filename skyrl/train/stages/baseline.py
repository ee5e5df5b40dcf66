"""One more, greedy rollout of each prompt, whose score is the baseline of the others (ReMax, arXiv:2310.10505).

It runs in the same call as the samples, behind them: so the engine works on all of them at the same time, also in the
deterministic mode, which queues a whole call at once. Afterwards it is cut off; only its score stays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from skyrl.train.generators.base import GeneratorInput, GeneratorOutput, TrajectoryID
from skyrl.train.generators.columns import recomputed_metrics
from skyrl.train.generators.metrics import valid_rows
from skyrl.train.generators.rewards import total_reward
from skyrl.train.stages.rolled_out import RolledOut, join_inputs, slice_input, slice_rollouts

SUFFIX = "#greedy"
"""Ends the uid of a greedy rollout."""


def add_greedy_rollouts(inputs: GeneratorInput, uids: Sequence[str], sampling_params: dict[str, Any]) -> GeneratorInput:
    """Append one row per prompt at temperature 0, with the uid `<uid>#greedy`.

    Args:
        inputs: The samples.
        uids: The prompt of each sample.
        sampling_params: Those of the samples, under the engine's names.
    """
    first_rows = list({uid: row for row, uid in reversed(list(enumerate(uids)))}.values())[::-1]
    greedy = slice_input(inputs, first_rows)
    greedy["env_extras"] = copy.deepcopy(greedy.get("env_extras"))
    greedy["trajectory_ids"] = [TrajectoryID(f"{uids[row]}{SUFFIX}", 0) for row in first_rows]
    greedy["sampling_params"] = [{**sampling_params, "temperature": 0.0} for _ in first_rows]
    return join_inputs([{**inputs, "sampling_params": [sampling_params for _ in uids]}, greedy])


def split_off_greedy(rolled: RolledOut, shape: Callable[[GeneratorOutput], GeneratorOutput]) -> RolledOut:
    """Cut the greedy rollouts off, and give each sample the score of its prompt's.

    Args:
        rolled: The samples, then one greedy row per prompt; `uids` of the samples only.
        shape: Changes the greedy rewards as training changes those of the samples.

    Returns:
        The samples with the column `baseline_scores` (NaN where the greedy rollout failed), and the greedy rollouts
        aside. Metrics that follow from rows are those of the samples.
    """
    prompts = list(dict.fromkeys(rolled.uids))
    everything = replace(rolled, uids=[*rolled.uids, *(f"{uid}{SUFFIX}" for uid in prompts)])
    num_samples = len(rolled.uids)
    samples = slice_rollouts(everything, range(num_samples))
    greedy = slice_rollouts(everything, range(num_samples, num_samples + len(prompts)))
    score = dict(zip(prompts, _scores(shape(greedy.output)), strict=True))
    output: Any = {**samples.output, "baseline_scores": [score[uid] for uid in rolled.uids]}
    return replace(samples, output=output, metrics=rolled.metrics | recomputed_metrics(output), aside=(greedy,))


def _scores(output: GeneratorOutput) -> list[float]:
    rewards = output["rewards"]
    scores = np.full(len(rewards), np.nan)
    for row in valid_rows(output.get("stop_reasons"), len(rewards)):
        scores[row] = total_reward(rewards[row])
    return [float(score) for score in scores]
