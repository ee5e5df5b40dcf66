"""From rollouts to a training batch."""

import numpy as np
import pytest
import torch

from skyrl.config.algorithm import AlgorithmConfig, CISPOConfig, OffPolicyCorrectionConfig, ScoreCenteringConfig
from skyrl.errors import ConfigError
from skyrl.train.stages.assemble import assemble, require_rollout_logprobs, token_level_rewards


def output(**changes):
    return {
        "prompt_token_ids": [[1, 2], [3, 4, 5]],
        "response_ids": [[6, 7, 8], [9]],
        "rewards": [0.5, 1.5],
        "loss_masks": [[1, 0, 1], [1]],
        "stop_reasons": ["stop", "length"],
        "rollout_logprobs": [[-1.0, 0.0, -2.0], [-3.0]],
    } | changes


def test_a_batch_has_the_spec_values():
    batch = assemble(output(), ["a", "b"], pad_token_id=0)
    assert batch["sequences"].tolist() == [[1, 2, 6, 7, 8], [0, 3, 4, 5, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]
    assert batch["response_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch["rewards"].tolist() == [[0.0, 0.0, 0.5], [0.0, 0.0, 1.5]]
    assert batch["loss_mask"].tolist() == [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]
    assert batch["rollout_logprobs"].tolist() == [[-1.0, 0.0, -2.0], [0.0, 0.0, -3.0]]
    assert batch["valid_rows"].tolist() == [True, True]
    assert batch.metadata == {"uids": ["a", "b"], "response_length": 3, "avg_response_length": 2.0}


def test_a_failed_rollout_is_a_row_but_no_sample():
    for reason in ("error", "abort", "timeout", "agent_timeout"):
        batch = assemble(output(stop_reasons=["stop", reason]), ["a", "a"], pad_token_id=0)
        assert batch["valid_rows"].tolist() == [True, False]
        assert batch["loss_mask"][1].tolist() == [0.0, 0.0, 0.0]
        assert batch["rewards"][1].tolist() == [0.0, 0.0, 0.0]
        assert batch["loss_mask"][0].tolist() == [1.0, 0.0, 1.0]


def test_a_failed_rollout_may_have_no_tokens():
    batch = assemble(
        output(
            prompt_token_ids=[[1, 2], []], response_ids=[[6], []], rewards=[1.0, 0.0], loss_masks=[[1], []],
            stop_reasons=["stop", "error"], rollout_logprobs=[[-1.0], []],
        ),
        ["a", "a"], pad_token_id=9,
    )  # fmt: skip
    assert batch["sequences"].tolist() == [[1, 2, 6], [9, 9, 9]]
    assert batch["attention_mask"][1].tolist() == [0, 0, 0]


def test_rewards_per_token_stay_where_they_are():
    batch = assemble(output(rewards=[[0.25, 0.0, 0.25], [1.0]]), ["a", "b"], pad_token_id=0)
    assert batch["rewards"].tolist() == [[0.25, 0.0, 0.25], [0.0, 0.0, 1.0]]


def test_a_scalar_reward_goes_to_the_last_token():
    rewards = token_level_rewards([1.5, np.float32(2.0), [0.5, 0.0], 3.0], [[1, 2], [1], [1, 2], []])
    assert [list(row) for row in rewards] == [[0.0, 1.5], [2.0], [0.5, 0.0], []]


def test_what_a_generator_leaves_out_is_left_out():
    batch = assemble(output(stop_reasons=None, rollout_logprobs=None), ["a", "b"], pad_token_id=0)
    assert "rollout_logprobs" not in batch
    assert batch["valid_rows"].all()
    assert "is_last_step" not in batch.metadata
    assert (
        assemble(output(is_last_step=[True, True]), ["a", "b"], pad_token_id=0).metadata["is_last_step"] == [True] * 2
    )


@pytest.mark.parametrize(
    ("changes", "uids", "text"),
    [
        ({}, ["a"], "1 uids but 2 rollouts"),
        ({"stop_reasons": ["stop"]}, ["a", "b"], "1 stop reasons but 2 rollouts"),
        ({"loss_masks": [[1, 1], [1]]}, ["a", "b"], "loss_masks of row 0 has 2 values but its response has 3 tokens"),
    ],
)
def test_lengths_that_disagree_are_named(changes, uids, text):
    with pytest.raises(AssertionError, match=text):
        assemble(output(**changes), uids, pad_token_id=0)


def test_what_cannot_be_trained_on_yet_is_refused():
    with pytest.raises(ConfigError, match="images"):
        assemble(output(pixel_values=[torch.zeros(1)] * 2), ["a", "b"], pad_token_id=0)
    with pytest.raises(ConfigError, match="rollout_expert_indices"):
        assemble(output(rollout_expert_indices=[np.zeros((1, 1, 1))] * 2), ["a", "b"], pad_token_id=0)


def test_parts_of_the_reward_become_columns_by_name():
    parts = {"correct": [1.0, 0.5], "format": [0.25, -1.0]}
    batch = assemble(output(reward_components=parts), ["a", "b"], pad_token_id=0)
    assert batch["reward_components"].tolist() == [[1.0, 0.25], [0.5, -1.0]]
    assert batch["reward_components"].dtype == torch.float32
    assert batch.metadata["reward_names"] == ["correct", "format"]


def test_a_failed_rollouts_parts_are_zero():
    parts = {"correct": [1.0, float("nan")]}
    batch = assemble(output(reward_components=parts, stop_reasons=["stop", "error"]), ["a", "b"], pad_token_id=0)
    assert batch["reward_components"].tolist() == [[1.0], [0.0]]


def test_baselines_become_a_column_and_a_failed_one_stays_nan():
    batch = assemble(output(baseline_scores=[0.75, float("nan")]), ["a", "b"], pad_token_id=0)
    assert batch["baseline_scores"][0] == 0.75 and batch["baseline_scores"][1].isnan()
    assert batch["baseline_scores"].shape == (2,)


def test_without_parts_and_baselines_there_are_no_columns():
    batch = assemble(output(reward_components=None, baseline_scores=None), ["a", "b"], pad_token_id=0)
    assert not {"reward_components", "baseline_scores"} & batch.keys()
    assert "reward_names" not in batch.metadata


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"off_policy_correction": OffPolicyCorrectionConfig(outlier_token_is_threshold_high=2.0)}, "off_policy_corr"),
        ({"policy_loss_type": "rollout_is"}, "policy_loss_type=rollout_is"),
        ({"policy_loss_type": "cispo", "cispo": CISPOConfig(cispo_anchor="rollout")}, "policy_loss_type=cispo"),
        ({"policy_loss_type": "reinforce", "score_centering": ScoreCenteringConfig(enabled=True)}, "score_centering"),
    ],
)
def test_what_reads_the_samplers_log_probs_is_refused_without_them(changes, setting):
    algorithm = AlgorithmConfig(**changes)
    with pytest.raises(ConfigError, match=rf"trainer\.algorithm\.{setting}.*no rollout_logprobs.*logprobs=1"):
        require_rollout_logprobs(assemble(output(rollout_logprobs=None), ["a", "b"], pad_token_id=0), algorithm)
    require_rollout_logprobs(assemble(output(), ["a", "b"], pad_token_id=0), algorithm)


@pytest.mark.parametrize("loss", ["regular", "dppo", "cispo", "reinforce"])
def test_other_losses_train_without_the_samplers_log_probs(loss):
    batch = assemble(output(rollout_logprobs=None), ["a", "b"], pad_token_id=0)
    require_rollout_logprobs(batch, AlgorithmConfig(policy_loss_type=loss))
    assert "rollout_logprobs" not in batch
