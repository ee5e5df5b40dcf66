"""The whole system on a tiny fp32 model: real engine, real actors, real files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from skyrl.backends.skyrl_train.cluster import initialize_ray
from skyrl.config.root import SkyRLTrainConfig
from skyrl.train.utils.metrics_file import read_metrics
from skyrl.train.validate import validate_run
from tests.fakes.digit_run import DigitExp, overrides
from tests.fakes.vllm_server import SharedServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CHANGING = re.compile(r"^(timing|ray)/|_s$|per_s|per_second|trajectory_time|t_start|t_end")
"""Names that hold times and rates."""


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Ray cluster for all runs of the module."""
    cfg = SkyRLTrainConfig.from_cli_overrides({"trainer.log_path": str(tmp_path_factory.mktemp("ray"))})
    initialize_ray(cfg)
    yield
    ray.shutdown()


def train(server: SharedServer, folder: Path, *extra: str) -> list[dict[str, Any]]:
    """Run to the end; returns the records of metrics.jsonl."""
    cfg = SkyRLTrainConfig.from_cli_overrides(overrides(server.url, server.model_dir, folder, *extra))
    validate_run(cfg)
    experiment = DigitExp(cfg)
    experiment.run()
    return read_metrics(str(Path(experiment.cfg.trainer.run_dir) / "metrics.jsonl"))


def steady(record: dict[str, Any]) -> dict[str, Any]:
    """A record without times and rates."""
    return {key: value for key, value in record.items() if not CHANGING.search(key)}


def test_reward_rises_and_every_promised_file_is_there(vllm_server: SharedServer, tmp_path: Path) -> None:
    records = train(
        vllm_server,
        tmp_path,
        "trainer.max_training_steps=16",
        "trainer.eval_interval=16",
        "trainer.hf_save_interval=16",
        "trainer.ckpt_interval=16",
    )
    rewards = [record["reward/avg_raw_reward"] for record in records if record["step"] > 0]
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.8
    assert records[0]["eval/all/avg_score"] < 0.2
    assert records[-1]["eval/all/avg_score"] > 0.8
    run_dir = tmp_path / "export" / "runs" / "test_run"
    assert (run_dir / "config.yaml").exists()
    assert {"reward.png"} <= {path.name for path in (run_dir / "plots").iterdir()}
    lines = (run_dir / "trajectories" / "train-000016.jsonl").read_text().splitlines()
    assert len(lines) == 64
    assert json.loads(lines[0])["weight_version"] == [16, 16]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export" / "global_step_16" / "policy").state_dict()
    saved = _stored_tensors(tmp_path / "ckpt" / "global_step_16", tmp_path)
    names = [name.removeprefix(".model.") for name in saved if name.startswith(".model.")]
    assert len(names) > 40
    assert all(torch.equal(saved[f".model.{name}"], exported[name]) for name in names)


def test_one_seed_gives_identical_metrics_and_fp32_sides_agree(vllm_server: SharedServer, tmp_path: Path) -> None:
    options = ("trainer.max_training_steps=3", "trainer.policy_mini_batch_size=4")
    first = train(vllm_server, tmp_path / "a", *options)
    second = train(vllm_server, tmp_path / "b", *options)
    assert [steady(record) for record in first] == [steady(record) for record in second]
    assert len(first) == 3
    for record in first:
        assert record["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-4


def test_another_seed_gives_other_rollouts(vllm_server: SharedServer, tmp_path: Path) -> None:
    first = train(vllm_server, tmp_path / "a", "trainer.max_training_steps=1")
    other = train(vllm_server, tmp_path / "b", "trainer.max_training_steps=1", "trainer.seed=43")
    assert steady(first[0]) != steady(other[0])


def test_a_resumed_run_repeats_the_unbroken_one_bit_for_bit(vllm_server: SharedServer, tmp_path: Path) -> None:
    options = (
        "trainer.ckpt_interval=1",
        "trainer.policy_mini_batch_size=4",
        "trainer.policy.optimizer_config.scheduler=cosine",
    )
    whole = train(vllm_server, tmp_path / "whole", *options, "trainer.max_training_steps=4")
    run_dir = tmp_path / "whole" / "export" / "runs" / "test_run"
    rollouts = _rollouts(run_dir, 4)
    (run_dir / "metrics.jsonl").unlink()
    resumed = train(
        vllm_server,
        tmp_path / "resumed",
        *options,
        "trainer.max_training_steps=4",
        "trainer.resume_mode=from_path",
        f"trainer.resume_path={tmp_path}/whole/ckpt/global_step_2",
    )
    assert [record["step"] for record in resumed] == [3, 4]  # in the folder of the run that it goes on with
    for left, right in zip(whole[2:], resumed, strict=True):
        left, right = steady(left), steady(right)
        assert left.pop("weight_sync/version") == right.pop("weight_sync/version") + 2  # counted by the client
        assert left == right
    for step in (3, 4):
        left = _stored_tensors(tmp_path / "whole" / "ckpt" / f"global_step_{step}", tmp_path)
        right = _stored_tensors(tmp_path / "resumed" / "ckpt" / f"global_step_{step}", tmp_path)
        assert left.keys() == right.keys()
        assert sum("exp_avg" in name for name in left) > 0
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert rollouts == _rollouts(run_dir, 4)


def _stored_tensors(checkpoint: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint's model and optimizer, flat."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    target = scratch / "flat.pt"
    dcp_to_torch_save(checkpoint / "policy" / "dcp", target)
    flat: dict[str, torch.Tensor] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            flat[prefix] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(f"{prefix}.{key}", item)

    walk("", torch.load(target, weights_only=True))
    return flat


def _rollouts(run_dir: Path, step: int) -> list[tuple[Any, ...]]:
    rows = [
        json.loads(line) for line in (run_dir / "trajectories" / f"train-{step:06d}.jsonl").read_text().splitlines()
    ]
    return [(row["uid"], row["prompt_token_ids"], row["response_ids"], row["reward"]) for row in rows]
