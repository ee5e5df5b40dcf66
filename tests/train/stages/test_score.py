"""Which forward passes a batch gets, and what they leave in it."""

import pytest
import torch

from skyrl.algorithms.policy_losses import PolicyLossRegistry, register_policy_loss
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch, pad_training_input_batch
from skyrl.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig
from skyrl.config.trainer import TrainerConfig
from skyrl.train.stages.score import ScoreStage
from tests.fakes.worker_dispatch import FakeWorkerDispatch


def make_batch(boundaries=((0, 3),), pad=0):
    batch = TrainingInputBatch(
        {
            "sequences": torch.arange(12).reshape(3, 4),
            "attention_mask": torch.ones(3, 4, dtype=torch.int64),
            "response_mask": torch.ones(3, 2, dtype=torch.int64),
            "loss_mask": torch.ones(3, 2),
            "rewards": torch.zeros(3, 2),
            "rollout_logprobs": torch.full((3, 2), -0.5),
        },
        {
            "uids": ["a", "b", "c"],
            "response_length": 2,
            "policy_mini_batch_boundaries": list(boundaries),
            "critic_mini_batch_boundaries": list(boundaries),
        },
    )
    return pad_training_input_batch(batch, pad)


def score(batch, dispatch=None, *, critic=False, ref=False, **changes):
    dispatch = dispatch or FakeWorkerDispatch({"policy": 1, "critic": 1, "ref": 1})
    stage = ScoreStage(dispatch, TrainerConfig(**changes), has_critic=critic, has_ref=ref)
    return *stage.run(batch), dispatch


def test_one_optimizer_step_needs_no_old_log_probs():
    batch, metrics, dispatch = score(make_batch())
    assert batch.metadata["old_is_current"] is True
    assert "action_log_probs" not in batch
    assert (metrics, dispatch.calls) == ({}, [])


@pytest.mark.parametrize(
    ("boundaries", "changes"),
    [
        (((0, 1), (1, 3)), {}),
        (((0, 3),), {"update_epochs_per_batch": 2}),
        (((0, 3),), {"algorithm": AlgorithmConfig(use_kl_in_reward=True)}),
    ],
    ids=["two mini-batches", "two epochs", "KL in the reward"],
)
def test_else_the_old_log_probs_are_computed_before_the_update(boundaries, changes):
    batch, metrics, dispatch = score(make_batch(boundaries), **changes)
    assert batch.metadata["old_is_current"] is False
    assert batch["action_log_probs"].tolist() == [[-1.0, -1.0]] * 3
    assert dispatch.count("forward_from_staged") == len(boundaries)
    assert metrics["policy/rollout_train_logprobs_abs_diff_mean"] == 0.5


def test_a_loss_anchored_on_the_sampler_reads_no_old_log_probs_but_kl_in_the_reward_and_corrections_do():
    def anchored(log_probs, old_log_probs, advantages, config, loss_mask):
        raise NotImplementedError

    register_policy_loss("anchored", needs_old_logprobs=False)(anchored)
    try:
        boundaries = ((0, 1), (1, 3))
        batch, _, dispatch = score(make_batch(boundaries), algorithm=AlgorithmConfig(policy_loss_type="anchored"))
        assert ("action_log_probs" in batch, dispatch.calls) == (False, [])
        without = make_batch(boundaries)
        without["rollout_logprobs"] = None
        batch, _, _ = score(without, algorithm=AlgorithmConfig(policy_loss_type="anchored"))
        assert "action_log_probs" in batch
        for changes in (
            {"use_kl_in_reward": True},
            {"off_policy_correction": OffPolicyCorrectionConfig(sequence_mask_metric="product")},
        ):
            algorithm = AlgorithmConfig(policy_loss_type="anchored", **changes)
            assert "action_log_probs" in score(make_batch(boundaries), algorithm=algorithm)[0]
    finally:
        PolicyLossRegistry.unregister("anchored")


def test_padding_rows_get_zeros_and_no_forward_pass_of_their_own():
    dispatch = FakeWorkerDispatch({"policy": 2, "critic": 2})
    batch, _, _ = score(make_batch(((0, 1), (1, 3)), pad=1), dispatch, critic=True)
    assert batch["action_log_probs"].tolist() == [[-1.0, -1.0]] * 3 + [[0.0, 0.0]]
    assert batch["values"].tolist() == [[0.5, 0.5]] * 3 + [[0.0, 0.0]]
    assert [len(rows) for model, rows in dispatch.scored if model == "policy"] == [2, 2]


def test_models_see_tokens_and_masks_only():
    _, _, dispatch = score(make_batch(((0, 1), (1, 3))), critic=True, ref=True)
    assert [model for model, _ in dispatch.scored] == ["critic", "critic", "ref", "policy", "policy"]
    for _, rows in dispatch.scored:
        assert set(rows) == {"sequences", "attention_mask", "response_mask"}
        assert set(rows.metadata) <= {"response_length", "pad_size"}


def test_the_policy_and_the_reference_also_see_what_the_sampler_kept():
    batch = make_batch(((0, 1), (1, 3)))
    batch["sample_support"] = torch.zeros(3, 2, 5, dtype=torch.int32)
    _, _, dispatch = score(batch, critic=True, ref=True)
    assert ["sample_support" in rows for _, rows in dispatch.scored] == [False, False, True, True, True]


def test_the_reference_scores_the_whole_batch_and_gives_its_memory_back():
    batch, _, dispatch = score(make_batch(pad=1), ref=True)
    assert batch["base_action_log_probs"].tolist() == [[-1.5, -1.5]] * 4
    assert dispatch.calls == [("forward", "ref"), ("empty_cache", "ref")]


def test_without_recomputation_per_mini_batch_one_pass_takes_all_rows():
    dispatch = FakeWorkerDispatch({"policy": 2})
    changes = {"recompute_old_logprobs_per_minibatch": False}
    batch, _, _ = score(make_batch(((0, 1), (1, 3)), pad=1), dispatch, **changes)
    assert dispatch.calls == [("forward", "policy")]
    assert batch["action_log_probs"].shape == (4, 2)
