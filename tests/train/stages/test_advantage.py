"""KL penalty and advantages of a batch."""

import copy
import json

import pytest
import torch

from skyrl.algorithms.advantages import AdvantageEstimatorRegistry, register_advantage_estimator
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch, pad_training_input_batch
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.train.stages.advantage import add_advantages, apply_kl_penalty
from skyrl.train.trainer import RayPPOTrainer
from tests.fakes.trainer import AlternatingGenerator, make_cfg, make_trainer, train
from tests.fakes.worker_dispatch import FakeWorkerDispatch


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


def with_parts():
    batch = make_batch()
    batch["reward_components"] = torch.tensor([[1.0, 10.0], [0.0, 0.0], [2.0, 4.0], [9.0, 9.0]])
    batch.metadata["reward_names"] = ["correct", "format"]
    return batch


@pytest.fixture
def own_estimator():
    """Registers an estimator that keeps what it was given and returns ones everywhere."""
    seen = {}

    @register_advantage_estimator("own")
    def own(token_level_rewards, valid_rows, baseline_scores, reward_components):
        seen.update(valid=valid_rows, baselines=baseline_scores, parts=reward_components)
        return torch.ones_like(token_level_rewards), torch.full_like(token_level_rewards, 2.0)

    yield seen
    AdvantageEstimatorRegistry.unregister("own")


def test_parts_and_baselines_reach_the_estimator(own_estimator):
    batch = with_parts()
    batch["baseline_scores"] = torch.tensor([0.5, 0.5, 1.0, torch.nan])
    add_advantages(batch, AlgorithmConfig(advantage_estimator="own"))
    assert {name: part.tolist() for name, part in own_estimator["parts"].items()} == {
        "correct": [1.0, 0.0, 2.0, 9.0],
        "format": [10.0, 0.0, 4.0, 9.0],
    }
    assert own_estimator["baselines"][:3].tolist() == [0.5, 0.5, 1.0]
    add_advantages(make_batch(), AlgorithmConfig(advantage_estimator="own"))
    assert own_estimator["parts"] is None and own_estimator["baselines"] is None


def test_a_failed_row_has_no_advantage_whatever_the_estimator_says(own_estimator):
    result, _ = add_advantages(make_batch(), AlgorithmConfig(advantage_estimator="own"))
    assert result["advantages"].tolist() == [[1.0, 1.0]] * 3 + [[0.0, 0.0]]
    assert result["returns"].tolist() == [[2.0, 2.0]] * 3 + [[0.0, 0.0]]


def test_every_part_is_measured_over_rows_that_did_not_fail():
    _, metrics = add_advantages(with_parts(), AlgorithmConfig())
    assert metrics["reward/component/correct"] == pytest.approx(1.0)
    assert metrics["reward/component/format"] == pytest.approx(14 / 3)
    _, padded = add_advantages(pad_training_input_batch(with_parts(), 3), AlgorithmConfig())
    assert padded == pytest.approx(metrics)
    _, without = add_advantages(make_batch(), AlgorithmConfig())
    assert not [name for name in without if name.startswith("reward/component")]


def test_gdpo_reads_the_parts_of_the_batch():
    """The spec's group: rewards [1, 0, 0, 0] and [10, 10, 0, 0]; a failed row stays out."""
    ones = torch.ones(5, 1)
    batch = TrainingInputBatch(
        {
            "rewards": torch.zeros(5, 1),
            "response_mask": ones,
            "loss_mask": ones,
            "valid_rows": torch.tensor([True] * 4 + [False]),
            "reward_components": torch.tensor([[1.0, 10.0], [0.0, 10.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]),
        }
    )
    batch.metadata = {"uids": ["a"] * 5, "reward_names": ["correct", "format"]}
    result, _ = add_advantages(batch, AlgorithmConfig(advantage_estimator="gdpo"))
    expected = [1.332110, 0.206079, -0.769094, -0.769094, 0.0]
    assert result["advantages"].flatten().tolist() == pytest.approx(expected, abs=1e-5)


def test_remax_reads_the_baselines_of_the_batch():
    ones = torch.ones(2, 1)
    columns = {"rewards": torch.tensor([[1.0], [0.0]]), "response_mask": ones, "loss_mask": ones}
    batch = TrainingInputBatch(columns | {"baseline_scores": torch.tensor([1.0, 1.0])})
    batch.metadata = {"uids": ["a", "a"]}
    result, _ = add_advantages(batch, AlgorithmConfig(advantage_estimator="remax"))
    assert result["advantages"].tolist() == [[0.0], [-1.0]]


def test_a_teacher_takes_the_place_of_the_rewards():
    """Old minus reference is [.5, -1], [., 0], [0, 0] on trained tokens; the environment's rewards are gone."""
    batch = make_batch()
    result, metrics = apply_kl_penalty(batch, 0.1, "k1", distil=True)
    assert result["rewards"].tolist() == [[-0.5, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert metrics == apply_kl_penalty(batch, 0.1, "k1")[1]
    assert torch.equal(batch["rewards"], make_batch()["rewards"])


class UpstreamDistillation(RayPPOTrainer):
    """Distillation as upstream's example writes it."""

    def apply_reward_kl_penalty(self, data):
        data["rewards"] = -(data["action_log_probs"] - data["base_action_log_probs"]) * data["loss_mask"]
        return data


@pytest.fixture
def own_no_op():
    register_advantage_estimator("no_op")(lambda token_level_rewards, **kwargs: (token_level_rewards,) * 2)
    yield
    AdvantageEstimatorRegistry.unregister("no_op")
    AdvantageEstimatorRegistry.repopulate_registry()


def distil(folder, cls, **changes):
    """Old log-probs are -1.0 and the teacher's -1.5; odd repetitions have reward 1."""
    settings = {"advantage_estimator": "no_op", "policy_loss_type": "importance_sampling", "use_kl_in_reward": True}
    cfg = make_cfg(folder, **{f"trainer__algorithm__{name}": value for name, value in (settings | changes).items()})
    dispatch = FakeWorkerDispatch({"policy": 1, "ref": 1})
    return train(make_trainer(cfg, folder, prompts=2, dispatch=dispatch, cls=cls))


def test_a_whole_step_learns_from_the_teacher_alone(tmp_path):
    trainer = distil(tmp_path, RayPPOTrainer, on_policy_distillation=True)
    record = trainer.tracker.records[0][1]
    assert record["reward/avg_raw_reward"] == 0.5 and record["loss/avg_final_rewards"] == -1.0
    assert record["loss/avg_kl"] > 0 and record["loss/kl_loss_coef"] == 0.001
    (_, rows), *_ = trainer.dispatch.trained
    assert rows["advantages"].tolist() == [[-0.5, -0.5]] * 4


def test_distillation_by_overriding_the_hook_works_too(tmp_path, own_no_op):
    trainer = distil(tmp_path, UpstreamDistillation)
    (_, rows), *_ = trainer.dispatch.trained
    assert rows["advantages"].tolist() == [[-0.5, -0.5]] * 4
    assert trainer.tracker.records[0][1]["loss/avg_final_rewards"] == -1.0


def test_parts_of_the_reward_go_from_the_generator_into_the_update_and_the_files(tmp_path):
    class Parts(AlternatingGenerator):
        async def generate(self, input_batch):
            output = await super().generate(input_batch)
            count = len(output["rewards"])
            return output | {"reward_components": {"correct": output["rewards"], "format": [0.25] * count}}

    cfg = make_cfg(tmp_path, trainer__algorithm__advantage_estimator="gdpo")
    trainer = train(make_trainer(cfg, tmp_path, prompts=2, generator=Parts()))
    record = trainer.tracker.records[0][1]
    assert (record["reward/component/correct"], record["reward/component/format"]) == (0.5, 0.25)
    (_, rows), *_ = trainer.dispatch.trained
    assert torch.sign(rows["advantages"][:, 0]).tolist() == [-1.0, 1.0, -1.0, 1.0]
    (path,) = tmp_path.glob("**/trajectories/train-000001.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["reward_components"] for line in lines] == [
        {"correct": correct, "format": 0.25} for correct in (0.0, 1.0, 0.0, 1.0)
    ]
