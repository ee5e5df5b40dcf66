"""Cutting and joining rollouts."""

import pytest

from skyrl.train.generators.base import TrajectoryID
from skyrl.train.stages.rolled_out import RolledOut, join_parts, slice_input, slice_rollouts


def make_rolled(uids, *, params=None, metrics=None, aside=()):
    ids = [TrajectoryID(uid, row) for row, uid in enumerate(uids)]
    inputs = {
        "prompts": [[{"role": "user", "content": uid}] for uid in uids],
        "env_classes": ["e"] * len(uids),
        "env_extras": [{"row": row} for row in range(len(uids))],
        "trajectory_ids": ids,
        "sampling_params": params,
        "batch_metadata": "metadata",
    }
    output = {
        "prompt_token_ids": [[1]] * len(uids),
        "response_ids": [[2, 3]] * len(uids),
        "rewards": [float(row) for row in range(len(uids))],
        "loss_masks": [[1, 1]] * len(uids),
        "reward_components": {"part": [10.0 + row for row in range(len(uids))]},
        "baseline_scores": [0.5] * len(uids),
    }
    return RolledOut(inputs=inputs, output=output, uids=list(uids), metrics=metrics or {}, aside=tuple(aside))


def test_all_columns_of_a_slice_have_its_rows():
    sliced = slice_rollouts(make_rolled("abc", params=[{"n": row} for row in range(3)], metrics={"m": 1}), [2, 0, 2])
    assert sliced.uids == ["c", "a", "c"]
    assert sliced.inputs["env_extras"] == [{"row": 2}, {"row": 0}, {"row": 2}]
    assert sliced.inputs["sampling_params"] == [{"n": 2}, {"n": 0}, {"n": 2}]
    assert sliced.inputs["batch_metadata"] == "metadata"
    assert sliced.output["rewards"] == [2.0, 0.0, 2.0]
    assert sliced.output["reward_components"] == {"part": [12.0, 10.0, 12.0]}
    assert sliced.output["baseline_scores"] == [0.5] * 3
    assert sliced.metrics == {"m": 1}


def test_parameters_for_the_whole_batch_and_absent_columns_stay():
    inputs = {"prompts": ["p", "q"], "env_classes": ["e", "e"], "env_extras": None, "sampling_params": {"n": 1}}
    assert slice_input(inputs, [1]) == {
        "prompts": ["q"],
        "env_classes": ["e"],
        "env_extras": None,
        "sampling_params": {"n": 1},
    }


def test_parts_are_joined_in_order_with_what_lies_aside_and_their_metrics():
    greedy = make_rolled("g")
    parts = [make_rolled("ab", metrics={"environment/x": 1.0}, aside=[greedy]), make_rolled("c")]
    joined = join_parts(parts)
    assert joined.uids == ["a", "b", "c"]
    assert [name.instance_id for name in joined.inputs["trajectory_ids"]] == ["a", "b", "c"]
    assert joined.output["rewards"] == [0.0, 1.0, 0.0]
    assert joined.output["baseline_scores"] == [0.5] * 3
    assert joined.output["reward_components"] == {"part": [10.0, 11.0, 10.0]}
    assert joined.aside == (greedy,)
    assert joined.metrics["environment/x"] == 1.0
    assert joined.metrics["generate/avg_num_tokens"] == 2.0
    assert "rollout_metrics" not in joined.output


def test_parts_that_contradict_each_other_are_refused():
    first, second = make_rolled("a"), make_rolled("b")
    second.output["rollout_logprobs"] = [[-1.0, -1.0]]
    with pytest.raises(ValueError, match="some generator outputs have rollout_logprobs"):
        join_parts([first, second])
