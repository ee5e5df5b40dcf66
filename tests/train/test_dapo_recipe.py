"""The overrides of upstream's DAPO recipe on GSM8K, sizes and task aside, from the command line to the last step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl.train.utils.metrics_file import read_metrics
from tests.fakes.digit_run import SPARSE_ENV, overrides
from tests.fakes.vllm_server import SharedServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
DAPO = [
    "trainer.algorithm.advantage_estimator=grpo",
    "trainer.algorithm.policy_loss_type=dual_clip",
    "trainer.algorithm.eps_clip_low=0.2",
    "trainer.algorithm.eps_clip_high=0.28",
    "trainer.algorithm.clip_ratio_c=10.0",
    "trainer.algorithm.loss_reduction=token_mean",
    "trainer.algorithm.dynamic_sampling.type=filter",
    "trainer.algorithm.dynamic_sampling.max_sample_batches=30",
    "trainer.algorithm.overlong_buffer_len=4",
    "trainer.algorithm.overlong_buffer_penalty_factor=1.0",
    "trainer.algorithm.use_kl_loss=false",
    "generator.apply_overlong_filtering=false",
    "generator.sampling_params.temperature=1.0",
    "generator.sampling_params.top_p=1.0",
]


def test_groups_without_spread_are_filtered_and_overlong_answers_punished(
    vllm_server: SharedServer, tmp_path: Path
) -> None:
    tokens = overrides(
        vllm_server.url,
        vllm_server.model_dir,
        tmp_path,
        *DAPO,
        f"environment.env_class={SPARSE_ENV}",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=4",
        "trainer.micro_train_batch_size_per_gpu=16",
        "generator.n_samples_per_prompt=4",
        "trainer.max_training_steps=2",
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.digit_run", *tokens],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    run_dir = tmp_path / "export" / "runs" / "test_run"
    records = read_metrics(str(run_dir / "metrics.jsonl"))
    assert [record["step"] for record in records] == [1, 2]
    for step, record in enumerate(records, 1):
        kept, dropped = groups(run_dir, step)
        assert len(kept) == 4
        assert record["generate/num_sample_batches"] * 4 == len(kept) + len(dropped)
        assert record["generate/good_group_share"] * (len(kept) + len(dropped)) >= len(kept)
        assert all(len({row["turns"][0]["reward"] for row in group}) == 2 for group in kept)
        for row in [row for group in kept for row in group]:
            start, length = 8 - 4, len(row["response_ids"])
            punishment = max(0, length - start) / 4
            assert row["reward"] == pytest.approx(row["turns"][0]["reward"] - punishment)
    kept, dropped = groups(run_dir, 1)
    assert records[0]["generate/num_sample_batches"] > 1
    without_spread = [group for group in dropped if len({row["turns"][0]["reward"] for row in group}) == 1]
    assert without_spread
    assert {len(row["response_ids"]) for group in kept for row in group} >= {8}


def groups(run_dir: Path, step: int) -> tuple[list[list[dict[str, Any]]], list[list[dict[str, Any]]]]:
    """The rollouts of one step by prompt: those that trained, and those that were left out."""
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for row in rollouts(run_dir, step):
        by_prompt.setdefault(row["uid"], []).append(row)
    kept = [group for group in by_prompt.values() if "advantage" in group[0]]
    return kept, [group for group in by_prompt.values() if "advantage" not in group[0]]


def rollouts(run_dir: Path, step: int) -> list[dict[str, Any]]:
    lines = (run_dir / "trajectories" / f"train-{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
