"""Every CPU recipe of examples/, end to end with --smoke: real servers, real training, two steps."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples" / "train"

pytestmark = [pytest.mark.recipe, pytest.mark.timeout(400)]

LOSS = "policy/loss_metrics"
# What each algorithm's recipe must show in its metrics, besides that it trains.
SHOWS = {
    "algorithms/grpo/run_grpo_cpu.sh": [f"{LOSS}/clip_ratio"],
    "algorithms/ppo/run_ppo_cpu.sh": ["critic/critic_loss", "critic/values_mean"],
    "algorithms/dapo/run_dapo_cpu.sh": ["generate/num_sample_batches", "generate/good_group_share"],
    "algorithms/gspo/run_gspo_cpu.sh": [f"{LOSS}/clip_ratio"],
    "algorithms/cispo/run_cispo_cpu.sh": [f"{LOSS}/cispo/ratio_mean"],
    "algorithms/sapo/run_sapo_cpu.sh": [f"{LOSS}/clip_ratio"],
    "algorithms/clip_cov_kl_cov/run_clip_cov_cpu.sh": [f"{LOSS}/clip_ratio"],
    "algorithms/clip_cov_kl_cov/run_kl_cov_cpu.sh": [f"{LOSS}/clip_ratio"],
    "algorithms/rloo/run_rloo_cpu.sh": ["loss/avg_kl"],
    "algorithms/reinforce++/run_reinforce++_cpu.sh": ["loss/avg_kl"],
    "algorithms/drgrpo/run_drgrpo_cpu.sh": [f"{LOSS}/clip_ratio"],
    "algorithms/maxrl/run_maxrl_cpu.sh": [f"{LOSS}/clip_ratio"],
    "algorithms/custom_advantage_estimator/run_custom_adv_est_cpu.sh": ["loss/avg_raw_advantages"],
    "algorithms/custom_policy_loss/run_custom_policy_loss_cpu.sh": [f"{LOSS}/chosen_log_prob"],
    "tis_correction/run_dapo_tis_cpu.sh": [f"{LOSS}/is_ratio_mean", f"{LOSS}/tis_token_clip_high_ratio"],
}


@pytest.fixture
def run_recipe(tmp_path):
    """Runs a script with --smoke, all files below ``tmp_path``; returns standard output and the metrics by step."""

    def run(script: str) -> tuple[str, list[dict]]:
        environment = os.environ | {"DATA_DIR": str(tmp_path / "data"), "UV_NO_SYNC": "1"}
        overrides = [f"trainer.ckpt_path={tmp_path}/ckpts", f"trainer.export_path={tmp_path}/exports"]
        command = ["bash", str(TRAIN / script), "--smoke", *overrides, f"trainer.run_dir={tmp_path}/run"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380)
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return done.stdout, [json.loads(line) for line in lines]

    return run


def steps_of(records: list[dict]) -> list[dict]:
    """The records of the two optimizer steps, after checking that they are sound."""
    steps = [record for record in records if "policy/final_loss" in record or "timing/step" in record]
    assert [record["step"] for record in steps] == [1, 2]
    for record in steps:
        assert all(math.isfinite(value) for name, value in record.items() if name.startswith(("policy/", "reward/")))
        assert record["policy/rollout_train_logprobs_abs_diff_mean"] <= 0.06
    assert steps[-1]["weight_sync/version"] > steps[0]["weight_sync/version"]
    return steps


@pytest.mark.parametrize(
    "script", ["quickstart/run_quickstart.sh", "gsm8k/run_gsm8k_cpu.sh", "multiply/run_multiply_cpu.sh"]
)
def test_a_recipe_trains_two_steps(run_recipe, script, tmp_path):
    output, records = run_recipe(script)
    steps_of(records)
    assert sum("eval/all/avg_score" in record for record in records) == 2
    assert (tmp_path / "ckpts" / "global_step_2" / "COMPLETE").exists()
    if "quickstart" in script:
        summary = json.loads(output.strip().splitlines()[-1])
        assert summary["steps"] == 2
        assert summary["cold_start_s"] > 0


def test_every_algorithm_has_its_recipe_here():
    scripts = [*TRAIN.glob("algorithms/*/run_*_cpu.sh"), *TRAIN.glob("tis_correction/run_*_cpu.sh")]
    assert {str(script.relative_to(TRAIN)) for script in scripts} == set(SHOWS)


@pytest.mark.parametrize("script", SHOWS)
def test_an_algorithm_trains_two_steps(run_recipe, script):
    output, records = run_recipe(script)
    for record in steps_of(records):
        assert [name for name in SHOWS[script] if not math.isfinite(record.get(name, math.nan))] == []
        if "dapo" in script:  # long responses lose reward
            assert record["reward/avg_raw_reward"] < record["environment/correct"]
    assert json.loads(output.strip().splitlines()[-1])["steps"] == 2
