"""Report stage: what an operator sees of a step, on the terminal and in the run's folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.config.root import SkyRLTrainConfig
from skyrl.train.generators.base import GeneratorOutput
from skyrl.train.generators.metrics import get_metrics_from_generator_output, valid_rows
from skyrl.train.generators.rewards import total_reward
from skyrl.train.stages.rolled_out import RolledOut
from skyrl.train.trajectories.writer import write_trajectories
from skyrl.train.utils.plots import draw_plots
from skyrl.train.utils.progress import Phase, Progress
from skyrl.train.utils.resource_monitor import ResourceMonitor, cluster_sources
from skyrl.train.utils.tracking import Tracking
from skyrl.train.utils.trajectory_logging import TrajectoryLogger, pretty_print_example

logger = logging.getLogger(__name__)

SUMMARY_KEYS = {
    "reward/avg_raw_reward": "reward",
    "eval/all/avg_score": "eval",
    "generate/avg_num_tokens": "tokens/response",
    "policy/grad_norm": "grad norm",
    "policy/rollout_train_logprobs_abs_diff_mean": "log-prob gap",
    "timing/step": "seconds",
}


class StepReport:
    """Progress lines, use of the machines and plots of one run."""

    def __init__(self, cfg: SkyRLTrainConfig, tracker: Tracking, *, total_steps: int | None) -> None:
        self._run_dir = cfg.trainer.run_dir
        self._tracker = tracker
        self._steps = total_steps
        self._progress: Progress | None = None
        self._monitor = ResourceMonitor(cluster_sources()) if cfg.trainer.enable_ray_gpu_monitor else None
        self.last_eval_score: float | None = None

    def start(self) -> None:
        """Begin to watch the machines and to show progress."""
        self._progress = Progress(self._steps)
        if self._monitor is not None:
            self._monitor.start()

    def stop(self) -> None:
        """End what `start` began, and draw the last plots."""
        if self._monitor is not None:
            self._monitor.stop()
        if self._progress is not None:
            self._progress.close()
        self.plot()

    @contextmanager
    def phase(self, name: str, step: int, *, total: int | None = None, unit: str = "") -> Iterator[Phase]:
        """Show one phase of a step while the block runs."""
        if self._progress is None:
            self._progress = Progress(self._steps)
        with self._progress.phase(name, step, total, unit) as phase:
            yield phase

    def system_metrics(self) -> dict[str, float]:
        """Return `ray/*` since the last call."""
        return {} if self._monitor is None else self._monitor.flush()

    def step_done(self, step: int, logs: Mapping[str, Any]) -> None:
        """Say in one line what the step achieved."""
        score = logs.get("eval/all/avg_score")
        self.last_eval_score = self.last_eval_score if score is None else float(score)
        if self._progress is not None and step > 0:
            self._progress.step_done(step)
        shown = [f"{label} {logs[key]:.4g}" for key, label in SUMMARY_KEYS.items() if key in logs]
        total = "" if self._steps is None else f"/{self._steps}"
        logger.info("Step %d%s: %s", step, total, ", ".join(shown))

    def plot(self) -> None:
        """Draw the curves so far into `<run_dir>/plots`."""
        if self._tracker.metrics_path is not None:
            draw_plots(self._tracker.metrics_path, os.path.join(self._run_dir, "plots"))


def reward_metrics(output: GeneratorOutput, uids: list[str], samples: int) -> dict[str, float]:
    """Measure the rewards of the rollouts that did not fail, and of greedy baselines, as `reward/*`."""
    metrics = get_metrics_from_generator_output(output, uids)
    failed = len(uids) - len(valid_rows(output.get("stop_reasons"), len(uids)))
    baselines = np.array(output.get("baseline_scores") or [], dtype=float)
    baselines = baselines[~np.isnan(baselines)]
    greedy = {"reward/avg_greedy_baseline": float(baselines.mean())} if baselines.size else {}
    return greedy | {
        f"reward/avg_pass_at_{samples}": metrics["pass_at_n"],
        "reward/avg_raw_reward": metrics["avg_score"],
        "reward/mean_positive_reward": metrics["mean_positive_reward"],
        "generate/num_failed": failed,
    }


def show_example(rolled: RolledOut, tokenizer: Any) -> None:
    """Print the first rollout of a batch."""
    output = rolled.output
    response = tokenizer.decode(output["response_ids"][0], skip_special_tokens=False)
    pretty_print_example(logger, rolled.inputs["prompts"][0], response, total_reward(output["rewards"][0]))


def log_rollouts(
    cfg: SkyRLTrainConfig,
    tracker: Tracking,
    trajectory_logger: TrajectoryLogger | None,
    rolled: RolledOut,
    tokenizer: Any,
    global_step: int,
) -> None:
    """Print an example and fill the tracker's table, as often as the config says."""
    interval = cfg.trainer.print_example_interval
    if interval > 0 and global_step % interval == 0:
        show_example(rolled, tokenizer)
    if trajectory_logger is not None:
        trajectory_logger.log(
            tracker,
            cfg.trainer.num_logger_train_samples,
            rolled.inputs["prompts"],
            rolled.output,
            tokenizer,
            global_step,
            wandb_key="trajectories/train",
            include_idx=False,
        )


def record_step(
    cfg: SkyRLTrainConfig, rolled: RolledOut, output: GeneratorOutput, batch: TrainingInputBatch, global_step: int
) -> None:
    """Write the step's trajectories, with what training made of them; those that lay aside follow."""
    write_trajectories(
        cfg.trainer.run_dir,
        "train",
        global_step,
        rolled.inputs,
        output,
        rolled.uids,
        batch=batch[: len(output["response_ids"])],
        aside=[(part.inputs, part.output, part.uids) for part in rolled.aside],
    )


def record_unfinished_step(cfg: SkyRLTrainConfig, sampled: RolledOut, global_step: int) -> None:
    """Write the trajectories of a step that was not trained on."""
    write_trajectories(
        cfg.trainer.run_dir,
        "train",
        global_step,
        sampled.inputs,
        sampled.output,
        sampled.uids,
        aside=[(part.inputs, part.output, part.uids) for part in sampled.aside],
    )
