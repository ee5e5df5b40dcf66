from types import SimpleNamespace

import pytest

from skyrl.train.generators.base import TrajectoryID
from skyrl.train.generators.columns import concatenate_generator_outputs, slice_generator_output


def make_output(rows, **changes):
    """Row i has i + 1 response tokens and reward i."""
    number = len(rows)
    output = {
        "prompt_token_ids": [[1] for _ in rows],
        "response_ids": [[5] * (row + 1) for row in rows],
        "rewards": [float(row) for row in rows],
        "loss_masks": [[1] * (row + 1) for row in rows],
        "stop_reasons": ["stop"] * number,
        "rollout_logprobs": [[-0.1] * (row + 1) for row in rows],
        "rollout_metrics": None,
        "trajectory_ids": None,
        "is_last_step": None,
        "trajectory_time_splits": {"llm": [float(row) for row in rows], "env": [0.0] * number},
        "trajectory_generation_times": [float(row + 1) for row in rows],
        "user_column": [f"u{row}" for row in rows],
    }
    return output | changes


def test_slicing_takes_rows_of_lists_and_of_dicts_of_lists():
    sliced = slice_generator_output(make_output([0, 1, 2], rollout_metrics={"a": 1}), [2, 0])
    assert sliced["rewards"] == [2.0, 0.0]
    assert sliced["trajectory_time_splits"] == {"llm": [2.0, 0.0], "env": [0.0, 0.0]}
    assert sliced["user_column"] == ["u2", "u0"]
    assert sliced["rollout_metrics"] == {"a": 1} and sliced["trajectory_ids"] is None


def test_slicing_can_drop_the_metrics_and_needs_rows():
    output = make_output([0, 1], rollout_metrics={"a": 1})
    assert slice_generator_output(output, [0], preserve_metrics=False)["rollout_metrics"] is None
    with pytest.raises(AssertionError):
        slice_generator_output(output, [])


def test_concatenation_joins_columns_and_computes_metrics_anew():
    first = make_output([0, 1], rollout_metrics={"generate/avg_num_tokens": 99, "generate/num_failed": 1.0})
    second = make_output([2], rollout_metrics={"generate/avg_num_tokens": 99, "generate/num_failed": 2.0})
    joined = concatenate_generator_outputs([first, second])
    assert joined["rewards"] == [0.0, 1.0, 2.0] and joined["user_column"] == ["u0", "u1", "u2"]
    assert joined["trajectory_time_splits"]["llm"] == [0.0, 1.0, 2.0]
    assert joined["rollout_metrics"]["generate/avg_num_tokens"] == 2.0
    assert joined["rollout_metrics"]["generate/num_failed"] == 3.0
    assert joined["rollout_metrics"]["generate/trajectory_time_completion_max"] == 3.0


def test_other_metrics_are_joined_by_name():
    names = ("x/avg_y", "x/min_y", "x/y_max", "x/count", "environment/rate")
    first = make_output([0, 1], rollout_metrics=dict(zip(names, (1.0, 1.0, 1.0, 1.0, 1.0), strict=True)))
    second = make_output([2], rollout_metrics=dict(zip(names, (4.0, 4.0, 4.0, 4.0, 4.0), strict=True)))
    metrics = concatenate_generator_outputs([first, second])["rollout_metrics"]
    assert [metrics[name] for name in names] == [2.0, 1.0, 4.0, 5.0, 2.0]  # means weighted 2 : 1


def test_optional_columns_survive_only_where_every_part_has_them():
    joined = concatenate_generator_outputs([make_output([0]), make_output([1], stop_reasons=None)])
    assert joined["stop_reasons"] is None


def test_half_the_logprobs_are_an_error():
    with pytest.raises(ValueError, match="rollout_logprobs"):
        concatenate_generator_outputs([make_output([0]), make_output([1], rollout_logprobs=None)])


def test_step_wise_parts_are_checked_as_such():
    first = make_output([0, 1], trajectory_ids=[TrajectoryID("a", 0)] * 2, is_last_step=[False, True])
    second = make_output([2], trajectory_ids=[TrajectoryID("b", 0)], is_last_step=[True])
    joined = concatenate_generator_outputs([first, second], step_wise=True)
    assert joined["is_last_step"] == [False, True, True]
    assert joined["rollout_metrics"]["generate/trajectory_time_completion_mean"] == 2.5  # two trajectories, not three
    with pytest.raises(AssertionError, match="appears again"):
        concatenate_generator_outputs([first, second, first], step_wise=True)


def test_metrics_of_joined_rows_are_those_before_the_filters():
    """A filter set the columns of the first row to zero; the records still hold what was sampled."""
    records = [SimpleNamespace(loss_mask=[1] * (row + 1), rewards=1.0, env_class="e") for row in range(2)]
    filtered = make_output([0, 1], rewards=[0.0, 1.0], loss_masks=[[0], [1, 1]], rollouts=records)
    metrics = concatenate_generator_outputs([filtered])["rollout_metrics"]
    assert metrics["generate/avg_assistant_tokens"] == 1.5
    assert metrics["generate/avg_tokens_zero_rewards"] == 0.0
