"""What a run learned and how fast, from its metrics.jsonl."""

from __future__ import annotations

from statistics import fmean
from typing import Any

REWARD = "reward/avg_raw_reward"
EVALUATION = "eval/all/avg_score"
STEP_TIME = "timing/step"
COLD_START = "timing/cold_start"
LOGPROB_GAP = "policy/rollout_train_logprobs_abs_diff_mean"


def summarize(records: list[dict[str, Any]], *, window: int = 3) -> dict[str, Any]:
    """Summarise a run from its records, one a step (``skyrl.train.utils.metrics_file.read_metrics``).

    Returns:
        ``reward_first`` and ``reward_last`` (means over the first and last ``window`` steps), ``eval_before`` and
        ``eval_after`` (first and last evaluation), ``steps``, ``cold_start_s`` (launch to first optimizer step),
        ``step_s`` (mean of all steps but the first, which warms up) and ``logprob_gap_mean``. What was never recorded
        is None.
    """
    rewards = _column(records, REWARD)
    evaluations = _column(records, EVALUATION)
    step_times = _column(records, STEP_TIME)
    return {
        "reward_first": _mean(rewards[:window]),
        "reward_last": _mean(rewards[-window:]),
        "eval_before": evaluations[0] if evaluations else None,
        "eval_after": evaluations[-1] if evaluations else None,
        "steps": len(rewards),
        "cold_start_s": next(iter(_column(records, COLD_START)), None),
        "step_s": _mean(step_times[1:] or step_times),
        "logprob_gap_mean": _mean(_column(records, LOGPROB_GAP)),
    }


def _column(records: list[dict[str, Any]], key: str) -> list[float]:
    return [record[key] for record in records if record.get(key) is not None]


def _mean(values: list[float]) -> float | None:
    return round(fmean(values), 4) if values else None
