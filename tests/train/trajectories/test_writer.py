import json
import math
import os

import pytest
import torch

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.trajectories.writer import trajectory_path, write_trajectories
from tests.fakes.environments import EnvScript
from tests.fakes.generators import make_batch, make_generator, roll_out
from tests.fakes.inference_engine import FakeInferenceEngine, script_of
from tests.fakes.tokenizers import make_byte_tokenizer


@pytest.fixture
def rolled():
    """Two rollouts of two tokens; the second failed."""
    tokenizer = make_byte_tokenizer()
    engine = FakeInferenceEngine(script_of("b", tokenizer=tokenizer), tokenizer, weight_version=3)

    def on_step(env, action):
        if env.extras["row"] == 1:
            raise ValueError("boom")

    inputs = make_batch(2, env_extras=[{"row": row, "data_source": "s"} for row in range(2)])
    script = EnvScript(on_step=on_step, rewards=(0.5,), metrics={"tries": 2})
    return inputs, roll_out(make_generator(engine, tokenizer), script, inputs)


def read(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file.read().splitlines()]


def test_a_line_tells_everything_about_a_rollout(tmp_path, rolled):
    inputs, output = rolled
    path = write_trajectories(str(tmp_path / "my-run"), "train", 7, inputs, output, ["p", "p"])
    assert path == str(tmp_path / "my-run" / "trajectories" / "train-000007.jsonl")
    good, bad = read(path)
    assert {key: good[key] for key in ("v", "run", "phase", "global_step", "uid", "instance_id", "repetition_id")} == {
        "v": 1,
        "run": "my-run",
        "phase": "train",
        "global_step": 7,
        "uid": "p",
        "instance_id": "p",
        "repetition_id": 0,
    }
    assert (good["env_class"], good["data_source"], good["attempt"]) == ("scripted", "s", 1)
    assert good["prompt"] == [{"role": "user", "content": "2+2?"}]
    assert good["messages"][1:] == [{"role": "assistant", "content": "b"}]
    assert good["prompt_token_ids"] == output["prompt_token_ids"][0]
    assert good["response_ids"] == output["response_ids"][0] and good["loss_mask"] == [1, 1]
    assert good["rollout_logprobs"] == [-0.01, -0.02]
    assert (good["rewards"], good["reward"], good["stop_reason"]) == ([0.0, 0.5], 0.5, "stop")
    assert good["weight_version"] == [3, 3] and good["failure"] is None
    assert set(good["turns"][0]) == {"prompt_len", "n_sampled", "stop_reason", "reward", "t_llm", "t_env"}
    assert good["t_start"] < good["t_end"] and set(good["time_splits"]) == {"llm", "env"}
    assert good["env_metrics"] == {"tries": 2}
    assert bad["failure"] == {"type": "ValueError", "message": "boom", "where": "env.step"}
    assert (bad["reward"], bad["stop_reason"], bad["attempt"]) == (None, "error", 2)


def test_training_adds_old_logprobs_and_the_advantage(tmp_path, rolled):
    inputs, output = rolled
    batch = TrainingInputBatch(
        {
            "loss_mask": torch.tensor([[0.0, 1, 1], [0, 0, 0]]),
            "action_log_probs": torch.tensor([[9.0, -0.1234567, -0.5], [9, 9, -1]]),
            "advantages": torch.tensor([[math.nan, 1.0, 3.0], [7, 7, 7]]),
        }
    )
    good, bad = read(write_trajectories(str(tmp_path), "train", 1, inputs, output, ["p", "p"], batch=batch))
    assert good["old_log_probs"] == [-0.123457, -0.5]
    assert (good["advantage"], bad["advantage"]) == (2.0, 0.0)
    assert bad["old_log_probs"] == [-1.0]


def test_parts_of_the_reward_and_the_baseline_are_in_the_line(tmp_path, rolled):
    inputs, output = rolled
    columns = {"reward_components": {"correct": [1.0, 0.0], "format": [0.5, 0.0]}, "baseline_scores": [0.25, math.nan]}
    good, bad = read(write_trajectories(str(tmp_path), "train", 1, inputs, output | columns, ["p", "p"]))
    assert good["reward_components"] == {"correct": 1.0, "format": 0.5} and good["baseline_score"] == 0.25
    assert bad["reward_components"] is None and bad["baseline_score"] is None
    plain, _ = read(write_trajectories(str(tmp_path), "train", 2, inputs, output, ["p", "p"]))
    assert plain["reward_components"] is None and plain["baseline_score"] is None


def test_numbers_that_json_lacks_become_null(tmp_path, rolled):
    inputs, output = rolled
    output |= {"env_metrics": [{"x": math.nan}, {}], "rollout_logprobs": [[math.inf, -0.1], [0.0]]}
    good, _ = read(write_trajectories(str(tmp_path), "train", 1, inputs, output, ["p", "p"]))
    assert good["env_metrics"] == {"x": None} and good["rollout_logprobs"] == [None, -0.1]


def test_a_generator_without_records_still_gives_lines(tmp_path):
    inputs = {"prompts": [[]], "env_classes": ["e"], "env_extras": None, "trajectory_ids": None}
    output = {"prompt_token_ids": [[1]], "response_ids": [[2]], "loss_masks": [[1]], "rewards": [1.0]}
    (line,) = read(write_trajectories(str(tmp_path), "train", 1, inputs, output, ["u"]))
    assert (line["uid"], line["reward"], line["rewards"], line["messages"], line["turns"]) == (
        "u",
        1.0,
        1.0,
        None,
        None,
    )
    assert line["rollout_logprobs"] is None and line["stop_reason"] is None


def test_rows_of_turns_find_their_prompt(tmp_path, rolled):
    inputs, output = rolled
    ids = inputs["trajectory_ids"]
    steps = {key: [value[0]] * 3 for key, value in output.items() if isinstance(value, list) and key != "rollouts"}
    steps |= {"trajectory_ids": [ids[0], ids[1], ids[1]], "is_last_step": [True, False, True]}
    lines = read(write_trajectories(str(tmp_path), "train", 1, inputs, steps, ["a", "b"]))
    assert [(line["uid"], line["step"], line["is_last_step"]) for line in lines] == [
        ("a", 0, True),
        ("b", 0, False),
        ("b", 1, True),
    ]


def test_a_repeated_training_step_replaces_its_file_and_an_evaluation_appends(tmp_path, rolled):
    inputs, output = rolled
    for phase, expected in (("train", 2), ("eval", 4)):
        for _ in range(2):
            path = write_trajectories(str(tmp_path), phase, 5, inputs, output, ["p", "p"])
        assert len(read(path)) == expected
    assert sorted(os.listdir(tmp_path / "trajectories")) == ["eval-000005.jsonl", "train-000005.jsonl"]


def test_a_full_disk_leaves_whole_lines(tmp_path, rolled, monkeypatch):
    inputs, output = rolled
    path = write_trajectories(str(tmp_path), "eval", 1, inputs, output, ["p", "p"])

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_trajectories(str(tmp_path), "eval", 1, inputs, output, ["p", "p"])
    assert len(read(path)) == 2


def test_paths_sort_by_step(tmp_path):
    assert trajectory_path(str(tmp_path), "eval", 0).endswith("trajectories/eval-000000.jsonl")
