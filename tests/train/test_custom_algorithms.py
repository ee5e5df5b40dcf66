"""Functions that a user registers in the script, in the controller, and after the workers run: all of them are used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl.train.utils.metrics_file import read_metrics
from tests.fakes.digit_run import overrides
from tests.fakes.vllm_server import SharedServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]

SCRIPT = '''
"""A user's script: run as __main__, beside a module that workers cannot import."""

from losses_beside_it import minus_log_prob

from skyrl.backends.skyrl_train.utils.ppo_utils import register_advantage_estimator, register_policy_loss
from skyrl.train.entrypoints.launch import run_hydra
from skyrl.train.trainer import RayPPOTrainer
from tests.fakes.digit_run import DigitExp


@register_advantage_estimator("of_the_script")
def of_the_script(token_level_rewards, response_mask, **kwargs):
    advantages = (token_level_rewards.sum(dim=-1, keepdim=True) - 0.1) * response_mask
    return advantages, advantages


@register_policy_loss("of_the_script")
def first(log_probs, old_log_probs, advantages, config, loss_mask):
    return minus_log_prob(log_probs, advantages, loss_mask), {"who": 1.0}


def second(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    return minus_log_prob(log_probs, advantages, loss_mask), {"who": 2.0}


def third(log_probs, old_log_probs, advantages, **kwargs):
    return minus_log_prob(log_probs, advantages, kwargs["loss_mask"]), {"who": 3.0}


class SwitchingTrainer(RayPPOTrainer):
    """Another loss every step; the third is registered when the workers have run for two steps."""

    def train_critic_and_policy(self, data):
        name = ["of_the_controller", "of_the_script", "of_the_last_step"][self.global_step - 1]
        if self.global_step == 3:
            register_policy_loss(name)(third)
        self.cfg.trainer.algorithm.policy_loss_type = name
        self.dispatch.set_algorithm_config("policy", policy_loss_type=name)
        return super().train_critic_and_policy(data)


class ScriptExp(DigitExp):
    def __init__(self, cfg):
        register_policy_loss("of_the_controller")(second)
        super().__init__(cfg)

    def get_trainer(self, *args, **kwargs):
        trainer = super().get_trainer(*args, **kwargs)
        trainer.__class__ = SwitchingTrainer
        return trainer


if __name__ == "__main__":
    run_hydra(ScriptExp)
'''

BESIDE = """
def minus_log_prob(log_probs, advantages, loss_mask):
    return -(log_probs * advantages * loss_mask).sum()
"""


def test_functions_registered_anywhere_reach_the_workers(vllm_server: SharedServer, tmp_path: Path) -> None:
    home = tmp_path / "users project"
    home.mkdir()
    (home / "my_run.py").write_text(SCRIPT)
    (home / "losses_beside_it.py").write_text(BESIDE)
    tokens = overrides(
        vllm_server.url,
        vllm_server.model_dir,
        tmp_path / "run",
        "trainer.max_training_steps=3",
        "trainer.algorithm.advantage_estimator=of_the_script",
        "trainer.algorithm.policy_loss_type=of_the_controller",
    )
    done = subprocess.run(
        [sys.executable, str(home / "my_run.py"), *tokens],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    records = read_metrics(str(tmp_path / "run" / "export" / "runs" / "test_run" / "metrics.jsonl"))
    assert [record["policy/loss_metrics/who"] for record in records] == [2.0, 1.0, 3.0]
    for record in records:
        assert record["policy/grad_norm"] > 0
        expected = record["reward/avg_raw_reward"] - 0.1
        assert record["loss/avg_raw_advantages"] == pytest.approx(expected, abs=0.02)  # rows differ in length
