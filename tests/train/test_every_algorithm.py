"""One step of every estimator, loss and correction: real actors, and one set of rollouts of the real engine."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import skyrl_gym
from skyrl.algorithms.advantages import AdvantageEstimatorRegistry
from skyrl.algorithms.policy_losses import PolicyLossRegistry
from skyrl.backends.skyrl_train.cluster import initialize_ray
from skyrl.backends.skyrl_train.workers.loss_config import merge_into
from skyrl.config.root import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.stages.rollout import RolledOut
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.validate import validate_cfg
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput
from tests.fakes.digit_run import DigitEnv, overrides
from tests.fakes.vllm_server import SharedServer, push_start_weights

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ENV = "digits_and_letters"
DOCS = Path(__file__).parents[2] / "docs"
Step = Callable[..., dict[str, Any]]


class TwoPartEnv(DigitEnv):
    """The reward is the sum of two named parts."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Score an answer."""
        digits = sum(character.isdigit() for character in action) / max(1, len(action))
        letters = float("e" in action)
        return BaseTextEnvStepOutput(
            observations=[],
            reward=digits + letters,
            done=True,
            metadata={"rewards": {"digits": digits, "letters": letters}},
        )


@pytest.fixture(scope="module")
def run(vllm_server: SharedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RayPPOTrainer, Any]]:
    """A trainer with policy, reference and critic, and 64 rollouts with their greedy baselines."""
    folder = tmp_path_factory.mktemp("every")
    skyrl_gym.register(id=ENV, entry_point="tests.train.test_every_algorithm:TwoPartEnv", force=True)
    tokens = overrides(
        vllm_server.url,
        vllm_server.model_dir,
        folder,
        "trainer.algorithm.advantage_estimator=remax",
        "trainer.algorithm.use_kl_loss=true",
        "trainer.policy.optimizer_config.lr=1e-3",
        f"trainer.critic.model.path={vllm_server.model_dir}",
        "trainer.critic_mini_batch_size=8",
        "trainer.micro_train_batch_size_per_gpu=16",
        f"environment.env_class={ENV}",
    )
    cfg = SkyRLTrainConfig.from_cli_overrides(tokens)
    initialize_ray(cfg)
    asyncio.run(push_start_weights(vllm_server))
    experiment = BasePPOExp(cfg)
    with experiment._cleanup:
        trainer = experiment._setup_trainer()
        trainer.global_step = 1

        async def roll_out() -> RolledOut:
            try:
                return await trainer._roll_out(next(iter(trainer.train_dataloader)))
            finally:
                await trainer.inference_engine_client.teardown()

        rolled = asyncio.run(roll_out())
        cfg.trainer.algorithm.advantage_estimator = "grpo"
        yield trainer, rolled
    ray.shutdown()


@pytest.fixture
def step(run: tuple[RayPPOTrainer, RolledOut]) -> Iterator[Step]:
    """Takes one step with some fields of `trainer.algorithm` changed; returns its metrics."""
    trainer, rolled = run
    plain = copy.deepcopy(trainer.cfg.trainer.algorithm)

    def take(**fields: Any) -> dict[str, Any]:
        algorithm = copy.deepcopy(plain)
        merge_into(algorithm, fields, "trainer.algorithm")
        trainer.cfg.trainer.algorithm = algorithm
        validate_cfg(trainer.cfg)
        for role in ("policy", "critic", "ref"):
            trainer.dispatch.set_algorithm_config(role, **dataclasses.asdict(algorithm))
        trainer.all_metrics, before = {}, weights(trainer)
        trainer._learn(rolled)
        changed = [name for name, value in weights(trainer).items() if not torch.equal(value, before[name])]
        assert changed, "no weight changed"
        return dict(trainer.all_metrics)

    yield take
    trainer.cfg.trainer.algorithm = plain


def weights(trainer: RayPPOTrainer) -> dict[str, torch.Tensor]:
    """Two of the policy's weights."""
    assert trainer.policy_model is not None
    names = [name for name, _ in trainer.policy_model.run("pass_through", "parameter_sizes")[0]]
    chosen = [name for name in names if name.endswith(("layers.0.mlp.down_proj.weight", "model.norm.weight"))]
    assert len(chosen) == 2
    values: dict[str, torch.Tensor] = trainer.policy_model.run("pass_through", "gather_parameters", chosen)[0]
    return values


def assert_sound(metrics: dict[str, Any]) -> None:
    """Everything is finite, the policy learned something, and every metric is documented."""
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    assert [name for name, value in numbers.items() if not math.isfinite(value)] == []
    assert metrics["policy/grad_norm"] > 0
    assert metrics["policy/grad_skipped"] == 0
    page = "".join(path.read_text() for path in [*DOCS.glob("algorithms/*.md"), DOCS / "reference" / "metrics.md"])
    named = set(re.findall(r"[\w/]*\w", page))
    own = [name.removeprefix("policy/loss_metrics/") for name in metrics if name.startswith("policy/loss_metrics/")]
    assert [name for name in own if name not in named and f"policy/loss_metrics/{name}" not in named] == []


@pytest.mark.parametrize("name", AdvantageEstimatorRegistry.list_available())
def test_an_estimator_takes_a_step(step: Step, name: str) -> None:
    metrics = step(advantage_estimator=name)
    assert_sound(metrics)
    assert metrics["loss/avg_raw_advantages_abs"] > 0
    assert metrics["policy/loss_metrics/clip_ratio"] == 0  # one optimizer step: every ratio is 1


OWN_METRICS = {
    "cispo": {"clip_ratio", "cispo/ratio_mean", "cispo/ratio_clamped_mean", "cispo/ratio_max", "cispo/ratio_min"},
    "importance_sampling": {"importance_ratio"},
}
"""What a loss reports, where it is not `clip_ratio` alone."""


@pytest.mark.parametrize("name", PolicyLossRegistry.list_available())
def test_a_loss_takes_a_step(step: Step, name: str) -> None:
    metrics = step(policy_loss_type=name)
    assert_sound(metrics)
    own = {key.removeprefix("policy/loss_metrics/") for key in metrics if key.startswith("policy/loss_metrics/")}
    assert own == OWN_METRICS.get(name, {"clip_ratio"})
    assert math.isfinite(metrics["policy/policy_loss"])


def test_the_rollout_anchored_cispo_takes_a_step(step: Step) -> None:
    metrics = step(policy_loss_type="cispo", cispo={"cispo_anchor": "rollout"})
    assert_sound(metrics)
    low, mean, high = (metrics[f"policy/loss_metrics/cispo/ratio_{name}"] for name in ("min", "mean", "max"))
    assert 0 < low < mean < high  # the steps before this one moved the policy away from the sampler


CORRECTIONS = {
    "token TIS": ({"tis_ratio_type": "token"}, {"tis_token_clip_high_ratio"}),
    "sequence TIS": ({"tis_ratio_type": "sequence"}, {"tis_seq_clip_high_ratio"}),
    "geometric mask": (
        {"sequence_mask_metric": "geometric"},
        {"geo_sequence_mask_masked_ratio", "geo_sequence_mask_over_high_ratio", "geo_sequence_mask_under_low_ratio"},
    ),
    "product mask": ({"sequence_mask_metric": "product"}, {"product_sequence_mask_masked_ratio"}),
    "outlier mask": ({"outlier_token_is_threshold_high": 2.0}, {"outlier_seq_masked_ratio"}),
    "token mask": (
        {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0},
        {"token_mask_ratio"},
    ),
}


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_correction_takes_a_step(step: Step, kind: str) -> None:
    fields, names = CORRECTIONS[kind]
    metrics = step(off_policy_correction=fields)
    assert_sound(metrics)
    names = names | {"is_ratio_mean", "is_ratio_max", "is_ratio_min", "is_ratio_std"}
    assert {f"policy/loss_metrics/{name}" for name in names} <= metrics.keys()


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "prompt_mean", "token_mean_legacy"])
def test_a_reduction_takes_a_step(step: Step, reduction: str) -> None:
    assert_sound(step(loss_reduction=reduction, use_entropy_loss=True))


def test_dr_grpo_takes_a_step(step: Step) -> None:
    assert_sound(step(loss_reduction="seq_mean_token_sum_norm", max_seq_len=8, grpo_norm_by_std=False))


def test_filters_take_a_step(step: Step) -> None:
    metrics = step(zero_variance_filter=True, overlong_buffer_len=4, advantage_batch_normalize=True)
    assert_sound(metrics)
    assert metrics["reward/num_zero_variance_filtered"] >= 0
