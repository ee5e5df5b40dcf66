import pytest

from skyrl_gym.envs.gsm8k.env import GSM8kEnv


def test_one_step_ends_the_episode():
    env = GSM8kEnv(extras={"reward_spec": {"ground_truth": "42"}})
    assert env.step("#### 42") == {"observations": [], "reward": 1.0, "done": True, "metadata": {}}


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({}, "reward_spec field is required"),
        ({"reward_spec": {}}, "ground_truth is required in reward_spec field"),
    ],
)
def test_a_missing_field_fails_at_construction(extras, message):
    with pytest.raises(AssertionError, match=message):
        GSM8kEnv(extras=extras)
