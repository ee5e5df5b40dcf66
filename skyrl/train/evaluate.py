"""Evaluation: roll out the evaluation prompts, score them by data source, keep what was said."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ConfigError
from skyrl.train.generators.base import GeneratorInterface, GeneratorOutput
from skyrl.train.generators.metrics import get_metrics_from_generator_output
from skyrl.train.generators.rewards import total_reward
from skyrl.train.generators.utils import slice_generator_output
from skyrl.train.stages.report import show_example
from skyrl.train.stages.rolled_out import RolledOut, join_parts
from skyrl.train.stages.rollout import RolloutStage
from skyrl.train.trajectories.writer import write_trajectories
from skyrl.utils import storage
from skyrl.utils.plain import json_safe
from skyrl.utils.timing import Timer

if TYPE_CHECKING:
    from skyrl.train.utils.progress import Phase
    from skyrl.train.utils.tracking import Tracking
    from skyrl.train.utils.trajectory_logging import TrajectoryLogger

logger = logging.getLogger(__name__)


async def evaluate(
    eval_dataloader: Any,
    generator: GeneratorInterface,
    cfg: SkyRLTrainConfig,
    global_step: int | None,
    tokenizer: Any,
    trajectory_logger: TrajectoryLogger | None = None,
    tracker: Tracking | None = None,
    progress: Phase | None = None,
) -> dict[str, float]:
    """Score the engines' current weights on every evaluation prompt.

    Args:
        eval_dataloader: Batches of dataset rows.
        generator: Makes the rollouts.
        cfg: `generator.eval_sampling_params`, `generator.eval_n_samples_per_prompt` and the paths count.
        global_step: Training step; None in an evaluation without training.
        tokenizer: Decodes the answers that are dumped and shown.
        trajectory_logger: Fills the tracker's table `trajectories/eval`.
        tracker: Where that table goes.
        progress: Counts the finished prompts.

    Returns:
        `eval/<source>/{avg_score,pass_at_n,mean_positive_reward}` per data source and for `all`, the rollout
        metrics as `eval/all/<name>`, and `timing/eval_generate`; empty when there are no prompts.
    """
    stage, timings = RolloutStage(generator, cfg), dict[str, float]()
    parts: list[RolledOut] = []
    with Timer("eval_generate", timings):
        for prompts in eval_dataloader:
            parts.append(await stage.run(prompts, phase="eval", global_step=global_step))
            if progress is not None:
                progress.advance(len(prompts))
    if not parts:
        logger.warning("data.val_data=%s holds no prompts: nothing was evaluated", cfg.data.val_data)
        return {}
    rolled = join_parts(parts)
    if cfg.trainer.print_example_interval > 0:
        show_example(parts[-1], tokenizer)
    sources = data_sources(rolled)
    metrics = calculate_per_dataset_metrics(
        rolled.output, rolled.uids, sources, cfg.generator.eval_n_samples_per_prompt
    )
    metrics |= {f"eval/all/{name}": value for name, value in rolled.metrics.items()}
    if cfg.trainer.dump_eval_results:
        dump_per_dataset_eval_results(dump_directory(cfg, global_step), rolled, sources, tokenizer, metrics)
    write_trajectories(cfg.trainer.run_dir, "eval", global_step or 0, rolled.inputs, rolled.output, rolled.uids)
    if trajectory_logger is not None and tracker is not None:
        trajectory_logger.log(
            tracker,
            cfg.trainer.num_logger_eval_samples,
            rolled.inputs["prompts"],
            rolled.output,
            tokenizer,
            global_step,
            wandb_key="trajectories/eval",
        )
    return metrics | {f"timing/{name}": seconds for name, seconds in timings.items()}


async def evaluate_step_wise(*arguments: Any, **options: Any) -> dict[str, float]:
    """Refuse: rows per turn are not built yet.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError("generator.step_wise_trajectories=true is not built yet; leave it false and use evaluate")


def data_sources(rolled: RolledOut) -> list[str | None]:
    """Return the `data_source` column of every row."""
    extras = rolled.inputs.get("env_extras") or [{}] * len(rolled.uids)
    return [extra.get("data_source") for extra in extras]


def source_name(source: str | None) -> str:
    """Name a data source in metrics and files: `openai/gsm8k` is `openai_gsm8k`, None is `unknown`."""
    return "unknown" if source is None else str(source).replace("/", "_")


def calculate_per_dataset_metrics(
    generator_output: GeneratorOutput,
    uids: Sequence[str],
    data_sources: Sequence[str | None],
    n_samples_per_prompt: int,
) -> dict[str, float]:
    """Score all rows and the rows of each data source.

    Args:
        generator_output: Columns of M rows.
        uids: Prompt of each row.
        data_sources: Data source of each row.
        n_samples_per_prompt: Rollouts per prompt, the n of `pass_at_n`.
    """
    groups: dict[str, list[int]] = {}
    for row, source in enumerate(data_sources):
        groups.setdefault(source_name(source), []).append(row)
    metrics: dict[str, float] = {}
    for name, rows in [*groups.items(), ("all", list(range(len(uids))))]:
        part = slice_generator_output(generator_output, rows)
        scores = get_metrics_from_generator_output(part, [uids[row] for row in rows])
        metrics[f"eval/{name}/avg_score"] = scores["avg_score"]
        metrics[f"eval/{name}/pass_at_{n_samples_per_prompt}"] = scores["pass_at_n"]
        metrics[f"eval/{name}/mean_positive_reward"] = scores["mean_positive_reward"]
    return metrics


def dump_directory(cfg: SkyRLTrainConfig, global_step: int | None) -> str:
    """Folder or bucket prefix of an evaluation's dumps."""
    name = "eval_only" if global_step is None else f"global_step_{global_step}_evals"
    return storage.join(cfg.trainer.export_path, "dumped_evals", name)


def dump_per_dataset_eval_results(
    directory: str, rolled: RolledOut, sources: Sequence[str | None], tokenizer: Any, metrics: dict[str, float]
) -> None:
    """Write `<source>.jsonl`, one object per row, and `aggregated_results.jsonl`, one line of metrics."""
    lines: dict[str, list[str]] = {}
    for row, source in enumerate(sources):
        lines.setdefault(source_name(source), []).append(_line(_dump_row(rolled, row, source, tokenizer)))
    storage.makedirs(directory)
    for name, rows in lines.items():
        storage.write_atomic(storage.join(directory, f"{name}.jsonl"), "\n".join(rows) + "\n")
    storage.write_atomic(storage.join(directory, "aggregated_results.jsonl"), _line(metrics) + "\n")


def _line(record: dict[str, Any]) -> str:
    return json.dumps(json_safe(record), allow_nan=False)


def _dump_row(rolled: RolledOut, row: int, source: str | None, tokenizer: Any) -> dict[str, Any]:
    output, inputs = rolled.output, rolled.inputs
    reasons, extras, ids = output.get("stop_reasons"), inputs.get("env_extras"), inputs.get("trajectory_ids")
    metadata = inputs.get("batch_metadata")
    return {
        "input_prompt": tokenizer.decode(output["prompt_token_ids"][row]),
        "output_response": tokenizer.decode(output["response_ids"][row]),
        "score": total_reward(output["rewards"][row]),
        "stop_reason": reasons[row] if reasons else None,
        "env_class": inputs["env_classes"][row],
        "env_extras": extras[row] if extras else {},
        "data_source": source,
        "trajectory_id": ids[row].to_string() if ids else rolled.uids[row],
        "step": metadata.global_step if metadata else None,
    }
