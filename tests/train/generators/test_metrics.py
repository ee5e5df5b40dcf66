import numpy as np
import pytest

import skyrl_gym
from skyrl.train.generators.metrics import (
    compute_turn_token_counts,
    get_metrics_from_generator_output,
    get_rollout_metrics,
)
from skyrl_gym.envs.base_text_env import BaseTextEnv


def output(rewards, masks=None, stop_reasons=None):
    return {"rewards": rewards, "loss_masks": masks, "stop_reasons": stop_reasons}


@pytest.mark.parametrize(
    ("rewards", "masks", "expected"),
    [
        ([[1, 0], [0, 1]], None, (1.0, 0.5, 1.0)),
        ([-1.0, 2.0], None, (0.5, 0.5, 1.0)),
        ([[1, -1], [-0.5, 0.5]], None, (0.0, 0.5, 0.75)),
        ([[0, 0.5, 0, 0], [0, 1]], None, (0.75, 0.5, 0.75)),
        ([[0, 0.5, 0, 0], [0, 1]], [[1, 1, 0, 0], [1, 1]], (0.75, 1.0, 0.75)),
        ([np.float32(-1.0), np.float32(2.0)], [[1], [1]], (0.5, 0.5, 1.0)),
    ],
)
def test_score_pass_and_positive_reward(rewards, masks, expected):
    metrics = get_metrics_from_generator_output(output(rewards, masks), ["a", "b"])
    assert (metrics["avg_score"], metrics["pass_at_n"], metrics["mean_positive_reward"]) == expected


@pytest.mark.parametrize(
    ("rewards", "passed", "avg", "positive"),
    [([0.0, 1.0, 0.0, 0.0], 0.5, 0.25, 0.25), ([-1.0, 1.0, 2.0, -2.0], 1.0, 0.0, 0.75)],
)
def test_one_passing_rollout_solves_its_prompt(rewards, passed, avg, positive):
    metrics = get_metrics_from_generator_output(output(rewards), ["a", "a", "b", "b"])
    assert metrics == {"avg_score": avg, "pass_at_n": passed, "mean_positive_reward": positive}


def test_failed_rollouts_count_nowhere():
    reasons = ["stop", "error", "timeout", "timeout"]
    metrics = get_metrics_from_generator_output(output([1.0, 0.0, 0.0, 0.0], None, reasons), ["a", "a", "b", "b"])
    assert metrics == {"avg_score": 1.0, "pass_at_n": 1.0, "mean_positive_reward": 1.0}
    nothing = get_metrics_from_generator_output(output([0.0], None, ["error"]), ["a"])
    assert nothing == {"avg_score": 0.0, "pass_at_n": 0.0, "mean_positive_reward": 0.0}


@pytest.mark.parametrize("rewards", [[], [[]]])
def test_no_rewards_are_an_error(rewards):
    with pytest.raises(ValueError):
        get_metrics_from_generator_output(output(rewards), ["a"])


def test_turns_are_runs_of_trained_tokens():
    assert compute_turn_token_counts([[1, 1, 0, 0, 1, 1, 1], [0, 0], [1], []]) == [2, 3, 1]


def test_token_counts_by_hand():
    metrics = get_rollout_metrics(
        [[1] * 2, [1] * 4, [1] * 6], [1.0, [0, 0, 0, 0], -1.0], loss_masks=[[1, 1], [1, 0, 0, 1], [0] * 6]
    )
    assert metrics["generate/min_num_tokens"] == 2 and metrics["generate/max_num_tokens"] == 6
    assert metrics["generate/avg_num_tokens"] == 4
    assert metrics["generate/std_num_tokens"] == pytest.approx((8 / 3) ** 0.5)
    assert metrics["generate/avg_tokens_non_zero_rewards"] == 2
    assert metrics["generate/avg_tokens_zero_rewards"] == 4
    assert metrics["generate/avg_assistant_tokens"] == pytest.approx(4 / 3)
    assert metrics["generate/tokens_per_turn_mean"] == pytest.approx(4 / 3)
    assert metrics["generate/tokens_per_turn_max"] == 2


def test_no_rewarded_row_gives_zero_not_nan():
    metrics = get_rollout_metrics([[1]], [-1.0], loss_masks=[[0]])
    assert metrics["generate/avg_tokens_non_zero_rewards"] == metrics["generate/avg_tokens_zero_rewards"] == 0.0
    assert metrics["generate/tokens_per_turn_mean"] == 0.0


def test_other_is_the_time_that_no_part_explains():
    metrics = get_rollout_metrics(
        [[1]] * 4,
        [0.0] * 4,
        trajectory_completion_times=[1.0, 2.0, 3.0, 10.0],
        trajectory_time_splits={"llm": [0.5, 1.0, 1.0, 6.0], "env": [0.25, 0.5, 1.0, 2.0]},
    )
    assert metrics["generate/trajectory_time_completion_mean"] == 4
    assert metrics["generate/trajectory_time_completion_p90"] == pytest.approx(7.9)
    assert metrics["generate/trajectory_time_completion_max"] == 10
    assert metrics["generate/trajectory_time_other_max"] == 2
    assert metrics["generate/trajectory_time_other_mean"] == pytest.approx((0.25 + 0.5 + 1 + 2) / 4)


class Tries(BaseTextEnv):
    pass


class Best(BaseTextEnv):
    @staticmethod
    def aggregate_metrics(metrics):
        return {"tries": max(episode["tries"] for episode in metrics)}


@pytest.fixture
def two_environments():
    for name, cls in (("tries", Tries), ("best", Best)):
        skyrl_gym.register(id=name, entry_point=cls, force=True)
    yield
    for name in ("tries", "best"):
        skyrl_gym.envs.deregister(name)


def test_each_environment_aggregates_its_own_metrics(two_environments):
    episodes = [{"tries": 1}, {"tries": 3}, {"tries": 5}, {"tries": 7}, {}]
    classes = ["tries", "tries", "best", "best", "best"]
    metrics = get_rollout_metrics([[1]] * 5, [0.0] * 5, episodes, classes)
    assert metrics["environment/tries/tries"] == 2.0 and metrics["environment/best/tries"] == 7
    alone = get_rollout_metrics([[1]] * 2, [0.0] * 2, episodes[:2], classes[:2])
    assert {key for key in alone if key.startswith("environment")} == {"environment/tries"}
