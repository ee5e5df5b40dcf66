"""Optimizer steps of a batch, and the numbers that they leave."""

import math

import pytest
import torch

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.config.trainer import TrainerConfig
from skyrl.train.stages.update import UpdateStage, mini_batch_loss_weights, old_gap_from_update, reduce_steps
from tests.fakes.worker_dispatch import FakeWorkerDispatch

GAP = "minibatch_rollout_logprobs_abs_diff"


def make_batch(**metadata):
    columns = {
        "loss_mask": torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]),
        "sequences": torch.arange(16).reshape(4, 4),
        "attention_mask": torch.ones(4, 4, dtype=torch.int64),
        "response_mask": torch.ones(4, 2, dtype=torch.int64),
        "advantages": torch.ones(4, 2),
        "returns": torch.ones(4, 2),
        "values": torch.zeros(4, 2),
        "rewards": torch.zeros(4, 2),
        "rollout_logprobs": None,
    }
    boundaries = {"policy_mini_batch_boundaries": [(0, 2), (2, 3)], "critic_mini_batch_boundaries": [(0, 3)]}
    fixed = {"uids": ["a", "a", "b", "pad0"], "response_length": 2, "old_is_current": False}
    return TrainingInputBatch(columns, fixed | boundaries | metadata)


def test_the_critic_learns_first_and_each_role_steps_after_each_of_its_mini_batches():
    dispatch, timings = FakeWorkerDispatch({"policy": 1, "critic": 1}), {}
    UpdateStage(dispatch, TrainerConfig(update_epochs_per_batch=2), has_critic=True).run(make_batch(), timings)
    critic = [("forward_backward_from_staged", "critic"), ("optim_step", "critic")]
    policy = [("forward_backward_from_staged", "policy"), ("optim_step", "policy")]
    assert dispatch.calls == [("stage_data", "critic"), *critic * 2, ("stage_data", "policy"), *policy * 4]
    assert [len(rows) for _, rows in dispatch.trained] == [3, 3, 2, 1, 2, 1]
    assert set(timings) == {"critic_train", "policy_train"}


def test_every_role_gets_its_columns_and_no_others():
    dispatch = FakeWorkerDispatch({"policy": 1, "critic": 1})
    UpdateStage(dispatch, TrainerConfig(), has_critic=True).run(make_batch(), {})
    shared = {"sequences", "attention_mask", "response_mask", "loss_mask", "loss_weights"}
    assert [set(rows) for _, rows in dispatch.trained] == [shared | {"values", "returns"}] + [
        shared | {"advantages"}
    ] * 2


def test_metrics_carry_the_role_and_are_reduced_over_its_steps():
    passes = [{"final_loss": 9.0}, {"final_loss": 1.0, "ratio_max": 2.0}, {"final_loss": 2.0, "ratio_max": 5.0}]
    dispatch = FakeWorkerDispatch({"policy": 1, "critic": 1}, train_metrics=passes, grad_norms=[4.0, 1.0, 3.0])
    metrics = UpdateStage(dispatch, TrainerConfig(), has_critic=True).run(make_batch(), {})
    assert metrics == {
        "critic/final_loss": 9.0,
        "critic/grad_norm": 4.0,
        "critic/grad_skipped": 0.0,
        "policy/final_loss": 1.5,
        "policy/ratio_max": 5.0,
        "policy/grad_norm": 2.0,
        "policy/grad_skipped": 0.0,
    }


def test_a_step_whose_gradient_is_not_finite_counts_as_skipped():
    dispatch = FakeWorkerDispatch(grad_norms=[math.inf, 1.0])
    metrics = UpdateStage(dispatch, TrainerConfig(), has_critic=False).run(make_batch(), {})
    assert metrics["policy/grad_skipped"] == 0.5


def test_the_gap_of_the_only_step_is_that_of_the_old_policy():
    passes = [{f"{GAP}_mean": 0.3, f"{GAP}_sq_mean": 0.13, f"{GAP}_max": 0.5, f"{GAP}_min": 0.1}]
    batch = make_batch(policy_mini_batch_boundaries=[(0, 3)], old_is_current=True)
    metrics = UpdateStage(FakeWorkerDispatch(train_metrics=passes), TrainerConfig(), has_critic=False).run(batch, {})
    named = {name: metrics[f"policy/rollout_train_logprobs_abs_diff_{name}"] for name in ("mean", "std", "max", "min")}
    assert named == {"mean": 0.3, "std": pytest.approx(0.2), "max": 0.5, "min": 0.1}
    assert old_gap_from_update({"final_loss": 1.0}) == {}


def test_the_time_of_the_first_policy_step_is_kept():
    stage = UpdateStage(FakeWorkerDispatch(), TrainerConfig(), has_critic=False)
    assert stage.first_step_at is None
    stage.run(make_batch(), {})
    first = stage.first_step_at
    stage.run(make_batch(), {})
    assert stage.first_step_at == first is not None


def test_steps_reduce_by_maximum_minimum_or_mean():
    seen = {"a_max": [1.0, 3.0], "b_min": [1.0, 3.0], "loss": [1.0, 3.0]}
    assert reduce_steps(seen) == {"a_max": 3.0, "b_min": 1.0, "loss": 2.0}


@pytest.mark.parametrize(("square", "deviation"), [(0.13, 0.2), (0.0899999, 0.0)])
def test_the_deviation_of_the_gap_comes_from_its_moments(square, deviation):
    seen = {f"{GAP}_mean": [0.2, 0.4], f"{GAP}_sq_mean": [square - 0.01, square + 0.01]}
    assert reduce_steps(seen) == {f"{GAP}_mean": pytest.approx(0.3), f"{GAP}_std": pytest.approx(deviation)}


def test_loss_weights_are_those_of_each_mini_batch():
    """token_mean: 3 trained tokens in rows 0 and 1, 2 in row 2; the padding row is in no mini-batch."""
    cfg = TrainerConfig(algorithm=AlgorithmConfig(loss_reduction="token_mean"))
    weights = mini_batch_loss_weights(make_batch(), [(0, 2), (2, 3)], cfg, "policy")
    third = pytest.approx(1 / 3)
    assert weights.tolist() == [[third, third], [third, third], [0.5, 0.5], [0.0, 0.0]]


def test_the_critic_takes_the_mean_of_rows_whatever_the_policy_takes():
    """Two rows with two tokens and one: 1/(2·2) and 1/(2·1)."""
    cfg = TrainerConfig(algorithm=AlgorithmConfig(loss_reduction="token_mean"))
    weights = mini_batch_loss_weights(make_batch(), [(0, 2)], cfg, "critic")
    assert weights.tolist() == [[0.25, 0.25], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]


def test_prompt_mean_weighs_by_the_prompts_of_the_mini_batch():
    """Prompt a has 3 tokens, b has 2: 1/(2·3) and 1/(2·2)."""
    cfg = TrainerConfig(algorithm=AlgorithmConfig(loss_reduction="prompt_mean"))
    weights = mini_batch_loss_weights(make_batch(), [(0, 3)], cfg, "policy")
    assert weights[:, 0].tolist() == [pytest.approx(1 / 6), pytest.approx(1 / 6), 0.25, 0.0]
