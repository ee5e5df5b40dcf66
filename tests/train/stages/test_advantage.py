"""KL penalty and advantages of a batch."""

import copy

import pytest
import torch

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch, pad_training_input_batch
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.train.stages.advantage import add_advantages, apply_kl_penalty


def make_batch():
    """Two groups; the last row of the second one failed."""
    return TrainingInputBatch(
        {
            "rewards": torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 3.0], [0.0, 0.0]]),
            "response_mask": torch.tensor([[1, 1], [0, 1], [1, 1], [1, 1]]),
            "loss_mask": torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]),
            "valid_rows": torch.tensor([True, True, True, False]),
            "action_log_probs": torch.tensor([[-1.0, -2.0], [float("nan"), -0.5], [-1.0, -1.0], [-9.0, -9.0]]),
            "base_action_log_probs": torch.tensor([[-1.5, -1.0], [0.0, -0.5], [-1.0, -1.0], [0.0, 0.0]]),
        },
        {"uids": ["a", "a", "b", "b"], "response_length": 2},
    )


def test_advantages_and_their_metrics():
    """Group a: scores 1, 0 give ±0.5. Group b has one valid row, score 3."""
    batch = make_batch()
    before = copy.deepcopy(batch)
    result, metrics = add_advantages(batch, AlgorithmConfig(grpo_norm_by_std=False))
    assert result["advantages"].tolist() == [[0.5, 0.5], [0.0, -0.5], [3.0, 3.0], [0.0, 0.0]]
    assert torch.equal(result["returns"], result["advantages"])
    assert metrics == {
        "loss/avg_final_rewards": pytest.approx(4 / 3),
        "loss/avg_raw_advantages": pytest.approx((0.5 * 2 - 0.5 + 6) / 5),
        "loss/avg_raw_advantages_abs": pytest.approx((0.5 * 3 + 6) / 5),
    }
    assert torch.equal(batch["rewards"], before["rewards"])
    assert batch.keys() == before.keys()
    assert batch.metadata == before.metadata


def test_padding_rows_change_neither_advantages_nor_metrics():
    for name in ("grpo", "rloo", "reinforce++"):
        algorithm = AlgorithmConfig(advantage_estimator=name)
        plain, metrics = add_advantages(make_batch(), algorithm)
        padded, padded_metrics = add_advantages(pad_training_input_batch(make_batch(), 3), algorithm)
        assert torch.equal(padded[:4]["advantages"], plain["advantages"])
        assert not padded[4:]["advantages"].any()
        assert padded_metrics == metrics


def test_gae_reads_the_values():
    batch = make_batch()
    batch["values"] = torch.full((4, 2), 0.5)
    result, _ = add_advantages(batch, AlgorithmConfig(advantage_estimator="gae"))
    assert result["returns"].tolist() == [[1.0, 1.0], [0.0, 0.0], [3.0, 3.0], [0.0, 0.0]]


def test_batch_normalisation_comes_after_the_raw_metrics():
    algorithm = AlgorithmConfig(grpo_norm_by_std=False, advantage_batch_normalize=True)
    result, metrics = add_advantages(make_batch(), algorithm)
    trained = result["advantages"][make_batch()["loss_mask"].bool()]
    assert trained.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert trained.square().mean().item() == pytest.approx(1.0, rel=1e-5)
    assert metrics["loss/avg_raw_advantages_abs"] == pytest.approx(1.5)


def test_a_batch_without_valid_rows_is_all_valid():
    batch = make_batch().select(["rewards", "response_mask", "loss_mask"])
    result, _ = add_advantages(batch, AlgorithmConfig(grpo_norm_by_std=False))
    assert result["advantages"][2:].tolist() == [[1.5, 1.5], [-1.5, -1.5]]


def test_a_batch_of_failures_gives_zeros():
    batch = make_batch()
    batch["valid_rows"] = torch.zeros(4, dtype=torch.bool)
    result, metrics = add_advantages(batch, AlgorithmConfig())
    assert not result["advantages"].any()
    assert set(metrics.values()) == {0.0}


def test_the_kl_penalty_is_taken_from_the_rewards():
    """k1 is [.5, -1], [·, 0], [0, 0]; the failed row counts nowhere."""
    batch = make_batch()
    result, metrics = apply_kl_penalty(batch, 0.1, "k1")
    assert result["kl"].tolist() == [[0.5, -1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert result["rewards"][0].tolist() == pytest.approx([-0.05, 1.1])
    assert result["rewards"][1:].tolist() == batch["rewards"][1:].tolist()
    assert metrics == {
        "loss/avg_kl": pytest.approx(-0.25 / 3),
        "loss/avg_kl_max": pytest.approx(1.0 / 3),
        "loss/kl_loss_coef": 0.1,
    }
    assert "kl" not in batch


def test_a_negative_coefficient_takes_nothing():
    result, _ = apply_kl_penalty(make_batch(), -0.5, "k1")
    assert torch.equal(result["rewards"], make_batch()["rewards"])
