import math

import pytest

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.metrics import aggregate_for_environment, default_aggregate_metrics


@pytest.mark.parametrize(
    ("episodes", "expected"),
    [
        ([], {}),
        ([{"a": 1}, {"a": 3, "b": 2}], {"a": 2.0, "b": 2.0}),
        ([{"ok": True}, {"ok": False}], {"ok": 0.5}),
        ([{"t": "x"}], {}),
        ([{"a": math.nan}, {"a": 4}, {"a": math.inf}], {"a": 4.0}),
    ],
)
def test_numbers_are_averaged_over_the_episodes_that_have_them(episodes, expected):
    assert default_aggregate_metrics(episodes) == expected


class Counting(BaseTextEnv):
    @staticmethod
    def aggregate_metrics(metrics):
        return {"episodes": len(metrics)}


@pytest.fixture
def registered():
    skyrl_gym.register(id="counting", entry_point=Counting, force=True)
    skyrl_gym.register(id="function", entry_point=lambda **_: Counting(), force=True)
    yield
    skyrl_gym.envs.deregister("counting")
    skyrl_gym.envs.deregister("function")


def test_the_class_aggregates_its_own_metrics(registered):
    assert aggregate_for_environment("counting", [{"a": 1}, {"a": 2}]) == {"episodes": 2}


def test_a_function_as_entry_point_gets_the_default(registered):
    assert aggregate_for_environment("function", [{"a": 1}, {"a": 2}]) == {"a": 1.5}


def test_an_unknown_environment_is_an_error():
    with pytest.raises(ValueError, match="'nope' is not registered"):
        aggregate_for_environment("nope", [])
