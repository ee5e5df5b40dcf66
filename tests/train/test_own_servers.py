"""Commands that start their own servers, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl.train.utils.metrics_file import read_metrics
from tests.fakes.digit_run import KILL_SERVER_VARIABLE, overrides
from tests.fakes.processes import eventually, processes_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
OWN_SERVER = [
    "generator.inference_engine.run_engines_locally=true",
    "generator.inference_engine.external_server_urls=null",
    "generator.inference_engine.external_proxy_url=null",
    "generator.inference_engine.enforce_eager=true",
    "generator.inference_engine.cpu_kv_cache_gb=0.25",
    "generator.inference_engine.max_num_seqs=64",
    "generator.inference_engine.max_num_batched_tokens=1024",
    "generator.deterministic=false",
]


def command(module: str, *tokens: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a module to its end."""
    return subprocess.run(
        [sys.executable, "-m", module, *tokens],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_a_run_trains_with_servers_of_its_own_and_vllm_loads_what_it_exports(tiny_model: Path, tmp_path: Path) -> None:
    common = ["trainer.placement.colocate_all=true", *OWN_SERVER]
    tokens = overrides("http://unused", tiny_model, tmp_path, *common, "trainer.max_training_steps=1")
    trained = command("tests.fakes.digit_run", *tokens, "trainer.hf_save_interval=1")
    assert trained.returncode == 0, trained.stderr[-3000:]
    record = read_metrics(str(tmp_path / "export" / "runs" / "test_run" / "metrics.jsonl"))[0]
    assert record["weight_sync/version"] == 2
    assert record["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-4

    export = tmp_path / "export" / "global_step_1" / "policy"
    row = {"prompt": [{"role": "user", "content": "n"}], "reward_spec": {"ground_truth": "1"}, "data_source": "toy"}
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(row) + "\n")
    evaluated = command(
        "skyrl.train.entrypoints.main_generate",
        *overrides("http://unused", export, tmp_path, *common, "environment.env_class=gsm8k"),
        f"data.val_data=[{tmp_path}/gsm8k.jsonl]",
        "trainer.run_name=evaluation",
    )
    assert evaluated.returncode == 0, evaluated.stderr[-3000:]
    dump = tmp_path / "export" / "dumped_evals" / "eval_only"
    assert json.loads((dump / "aggregated_results.jsonl").read_text())["eval/toy/avg_score"] == 0.0
    assert len((dump / "toy.jsonl").read_text().splitlines()) == 1


def test_a_server_that_dies_while_generating_ends_the_run(tiny_model: Path, tmp_path: Path) -> None:
    tokens = overrides("http://unused", tiny_model, tmp_path, *OWN_SERVER, "trainer.max_training_steps=3")
    died = command(
        "tests.fakes.digit_run",
        *tokens,
        "generator.sampling_params.max_generate_length=400",
        "generator.sampling_params.additional_kwargs={ignore_eos: true}",
        **{KILL_SERVER_VARIABLE: "2"},
    )
    assert died.returncode == 1
    assert "error: " in died.stderr
    assert "server" in died.stderr.splitlines()[-1]
    assert eventually(lambda: not processes_of(tmp_path), 30), processes_of(tmp_path)
