import numpy as np
import pytest

from skyrl.train.generators.base import TrajectoryID
from skyrl.train.generators.output_checks import validate_generator_output

A, B = TrajectoryID("a", 0), TrajectoryID("b", 0)


def valid(**changes):
    output = {
        "prompt_token_ids": [[1], [1, 2]],
        "response_ids": [[3, 4], [5]],
        "rewards": [[0.0, 1.0], [0.5]],
        "loss_masks": [[1, 1], [1]],
        "rollout_logprobs": [[-0.1, 0.0], [-0.2]],
        "stop_reasons": ["stop", "length"],
    }
    return output | changes


def test_a_sound_output_passes():
    validate_generator_output(2, valid())
    validate_generator_output(2, valid(rewards=[1.0, np.float32(0.5)], rollout_logprobs=None, stop_reasons=None))
    validate_generator_output(2, valid(response_ids=[np.array([3, 4]), np.array([5])]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop_reasons": ["stop"]}, "stop_reasons has 1 rows"),
        ({"prompt_token_ids": [[1]]}, "prompt_token_ids has 1 rows"),
        ({"trajectory_ids": [A]}, "trajectory_ids has 1 rows"),
        ({"loss_masks": [[1], [1]]}, "row 0: loss_masks has 1 entries"),
        ({"rewards": [[0.0, 1.0], [0.5, 0.5]]}, "row 1: rewards has 2 entries"),
        ({"rollout_logprobs": [[-0.1, -0.1], []]}, "row 1: rollout_logprobs has 0 entries"),
        ({"rewards": [1.0, [0.5]]}, "mixes numbers"),
        ({"rewards": [None, None]}, "row 0: rewards is None, neither a number nor"),
        ({"rewards": ["1", "0"]}, "row 0: rewards is '1', neither a number nor"),
        ({"prompt_token_ids": [[1], []]}, "row 1: prompt_token_ids is empty"),
        ({"response_ids": [[3, -4], [5]]}, "token id -4"),
        ({"response_ids": [[3, 0.5], [5]]}, "something else than integers"),
        ({"rollout_logprobs": [[-0.1, float("nan")], [-0.2]]}, "row 0: rollout_logprobs holds NaN"),
        ({"rollout_logprobs": [[-0.1, 0.5], [-0.2]]}, "row 0: rollout_logprobs holds 0.5"),
    ],
)
def test_a_contradiction_is_named(changes, message):
    with pytest.raises(AssertionError, match=message):
        validate_generator_output(2, valid(**changes))


def test_rows_must_match_the_prompts():
    with pytest.raises(AssertionError, match="2 rows for 3 prompts"):
        validate_generator_output(3, valid())
    with pytest.raises(RuntimeError):
        validate_generator_output(0, valid(response_ids=[]))


def test_a_batch_that_trains_nothing_is_only_a_warning(caplog):
    validate_generator_output(2, valid(loss_masks=[[0, 0], [0]]))
    assert "trains nothing" in caplog.text


@pytest.mark.parametrize(
    ("ids", "last", "message"),
    [
        (None, [False, True], "need is_last_step and trajectory_ids"),
        ([A, A], None, "need is_last_step and trajectory_ids"),
        ([A, A], [True, False], "is_last_step of the last row must be True"),
        ([A, B], [False, True], "row 0: is_last_step is False"),
        ([A, A], [True, True], "row 0: is_last_step is True"),
    ],
)
def test_step_wise_rows_end_where_their_trajectory_does(ids, last, message):
    with pytest.raises(AssertionError, match=message):
        validate_generator_output(1, valid(trajectory_ids=ids, is_last_step=last), step_wise=True)


def test_sound_step_wise_rows_pass():
    validate_generator_output(1, valid(trajectory_ids=[A, A], is_last_step=[False, True]), step_wise=True)
