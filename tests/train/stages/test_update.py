"""Optimizer steps of a batch, and the numbers that they leave."""

import math

import pytest
import torch

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.config.trainer import TrainerConfig
from skyrl.train.stages.update import UpdateStage, mini_batch_loss_weights
from tests.fakes.worker_dispatch import FakeWorkerDispatch


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


def test_what_the_sampler_returned_reaches_the_policy():
    batch = make_batch()
    names = ("sample_support", "sampler_topk_ids", "sampler_topk_logprobs")
    for name in names:
        batch[name] = torch.zeros(4, 2, 3)
    dispatch = FakeWorkerDispatch({"policy": 1, "critic": 1})
    UpdateStage(dispatch, TrainerConfig(), has_critic=True).run(batch, {})
    assert [set(names) <= set(rows) for _, rows in dispatch.trained] == [False, True, True]


OLD_GAP = "policy/rollout_train_logprobs_abs_diff"


@pytest.mark.parametrize(
    ("boundaries", "mean", "lowest"),
    [([(0, 3)], (0.9 + 0.7 + 0.3 + 0.2 + 0.1) / 5, 0.1), ([(0, 2), (2, 3)], 1.9 / 3, 0.3)],
)
def test_without_an_old_forward_pass_the_first_step_gives_the_gap_of_the_old_policy(boundaries, mean, lowest):
    """The policy says -1 everywhere; the sampler's gaps are .9, .7; (masked), .3; .2, .1."""
    batch = make_batch(policy_mini_batch_boundaries=boundaries, old_is_current=len(boundaries) == 1)
    batch["rollout_logprobs"] = torch.tensor([[-0.1, -0.3], [float("nan"), -0.7], [-0.8, -0.9], [-9.0, -9.0]])
    dispatch = FakeWorkerDispatch({"policy": 2})
    metrics = UpdateStage(dispatch, TrainerConfig(), has_critic=False).run(batch, {})
    assert metrics[f"{OLD_GAP}_mean"] == pytest.approx(mean)
    assert metrics[f"{OLD_GAP}_min"] == pytest.approx(lowest, abs=1e-6)
    assert metrics[f"{OLD_GAP}_max"] == pytest.approx(0.9)
    assert "policy/rollout_train_kl_k3" in metrics


def test_after_an_old_forward_pass_the_gap_is_not_measured_again():
    batch = make_batch()
    batch["rollout_logprobs"] = batch["action_log_probs"] = torch.zeros(4, 2)
    metrics = UpdateStage(FakeWorkerDispatch(), TrainerConfig(), has_critic=False).run(batch, {})
    assert not [name for name in metrics if name.startswith(OLD_GAP)]


def test_the_time_of_the_first_policy_step_is_kept():
    stage = UpdateStage(FakeWorkerDispatch(), TrainerConfig(), has_critic=False)
    assert stage.first_step_at is None
    stage.run(make_batch(), {})
    first = stage.first_step_at
    stage.run(make_batch(), {})
    assert stage.first_step_at == first is not None


def test_a_deviation_comes_from_the_moments_over_all_steps():
    """Means .2 and .4, mean squares .12 and .14: over both steps .3 and .13, so the deviation is .2."""
    passes = [{"x_mean": 0.2, "x_sq_mean": 0.12}, {"x_mean": 0.4, "x_sq_mean": 0.14}]
    metrics = UpdateStage(FakeWorkerDispatch(train_metrics=passes), TrainerConfig(), has_critic=False).run(
        make_batch(), {}
    )
    moments = {name: value for name, value in metrics.items() if name.startswith("policy/x_")}
    assert moments == {"policy/x_mean": pytest.approx(0.3), "policy/x_std": pytest.approx(0.2)}


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
