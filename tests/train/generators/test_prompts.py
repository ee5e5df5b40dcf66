import pytest

from skyrl.errors import ConfigError
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.generators.prompts import prepare_generator_input


def item(uid, env_class=None):
    return {"prompt": [{"role": "user", "content": uid}], "env_class": env_class, "env_extras": {"x": [1]}, "uid": uid}


def test_a_groups_rollouts_stand_together():
    batch, uids = prepare_generator_input([item("a"), item("b", "own")], 2, {"top_p": 0.9}, "gsm8k", "train", 7)
    assert uids == ["a", "a", "b", "b"]
    assert batch["trajectory_ids"] == [TrajectoryID(uid, rep) for uid in "ab" for rep in (0, 1)]
    assert batch["env_classes"] == ["gsm8k", "gsm8k", "own", "own"]
    assert [prompt[0]["content"] for prompt in batch["prompts"]] == uids
    assert (batch["batch_metadata"].global_step, batch["batch_metadata"].training_phase) == (7, "train")
    assert batch["sampling_params"] == {"top_p": 0.9}


def test_every_rollout_has_its_own_extras():
    batch, _ = prepare_generator_input([item("a")], 2, None, "gsm8k", "eval", None)
    batch["env_extras"][0]["x"].append(2)
    assert batch["env_extras"][1] == {"x": [1]}


def test_a_prompt_needs_an_environment():
    with pytest.raises(ConfigError, match="prompt a names no environment"):
        prepare_generator_input([item("a")], 1, None, None, "train", 1)
