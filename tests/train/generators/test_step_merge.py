import pytest

from skyrl.train.generators.base import TrajectoryID
from skyrl.train.generators.step_merge import merge_stepwise_output

A, B = TrajectoryID("a", 0), TrajectoryID("b", 0)


def steps(prompts, responses, ids=None, **changes):
    ids = ids or [A] * len(prompts)
    last = [index + 1 == len(ids) or ids[index + 1] != name for index, name in enumerate(ids)]
    output = {
        "prompt_token_ids": prompts,
        "response_ids": responses,
        "loss_masks": [[1] * len(response) for response in responses],
        "rewards": [[0.0] * (len(response) - 1) + [float(end)] for response, end in zip(responses, last, strict=True)],
        "rollout_logprobs": [[-0.1] * len(response) for response in responses],
        "stop_reasons": [f"reason {index}" for index in range(len(prompts))],
        "trajectory_ids": ids,
        "is_last_step": last,
        "trajectory_time_splits": {"llm": [float(index) for index in range(len(prompts))]},
    }
    return output | changes


def test_a_turn_that_continues_the_last_one_joins_it():
    merged = merge_stepwise_output(
        steps([[10], [10, 20, 30]], [[20], [40, 41]], rollout_logprobs=[[-0.1], [-0.2, -0.3]])
    )
    assert merged["prompt_token_ids"] == [[10]]
    assert merged["response_ids"] == [[20, 30, 40, 41]]
    assert merged["loss_masks"] == [[1, 0, 1, 1]]
    assert merged["rewards"] == [[0, 0, 0, 1]]
    assert merged["rollout_logprobs"] == [[-0.1, 0.0, -0.2, -0.3]]
    assert merged["stop_reasons"] == ["reason 1"] and merged["is_last_step"] == [True]
    assert merged["trajectory_time_splits"] == {"llm": [1.0]}


def test_the_example_of_the_trainer():
    merged = merge_stepwise_output(steps([[1, 2], [1, 2, 3, 4, 9]], [[3, 4], [5]]))
    assert (merged["response_ids"], merged["loss_masks"]) == ([[3, 4, 9, 5]], [[1, 1, 0, 1]])


@pytest.mark.parametrize("second_prompt", [[1, 9, 3], [1, 7]])
def test_a_history_that_was_rewritten_starts_a_new_row(second_prompt):
    merged = merge_stepwise_output(steps([[1], second_prompt], [[2], [4]]))
    assert merged["response_ids"] == [[2], [4]]


def test_only_what_fits_is_joined():
    merged = merge_stepwise_output(steps([[1], [5], [5, 6, 7]], [[2], [6], [8]]))
    assert merged["response_ids"] == [[2], [6, 7, 8]]
    assert merged["is_last_step"] == [False, True]


def test_trajectories_are_never_joined_and_scalar_rewards_come_from_the_last_row():
    output = steps([[1], [1, 2, 3], [1, 2, 3, 4]], [[2], [4], [5]], ids=[A, A, B], rewards=[0.0, 0.5, 1.0])
    merged = merge_stepwise_output(output)
    assert merged["rewards"] == [0.5, 1.0] and merged["trajectory_ids"] == [A, B]


@pytest.mark.parametrize(
    "changes",
    [{"trajectory_ids": None}, {"is_last_step": None}, {"rollout_expert_indices": [1]}, {"pixel_values": [1]}],
)
def test_what_cannot_be_merged_is_refused(changes):
    with pytest.raises(AssertionError):
        merge_stepwise_output(steps([[1]], [[2]]) | changes)
