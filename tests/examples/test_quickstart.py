from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from examples.train.quickstart.env import AdditionEnv, last_number
from examples.train.quickstart.prepare_model import prepare_model
from examples.train.quickstart.quickstart_dataset import split_pairs, write_dataset
from examples.train.quickstart.summary import summarize


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("19", "19"),
        ("12 + 7 = 19.", "19"),
        ("The answer is 1,234!", "1234"),
        ("It is 3, 4", "4"),
        ("-5", "-5"),
        ("19.5", "19.5"),
        ("nineteen", None),
        ("", None),
    ],
)
def test_the_last_number_counts(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(("answer", "reward"), [("12 + 7 = 19", 1.0), ("19 or 20", 0.0), ("I don't know", 0.0)])
def test_addition_rewards_exactly_the_right_number(answer, reward):
    env = AdditionEnv(extras={"reward_spec": {"method": "rule", "ground_truth": "19"}})
    out = env.step(answer)
    assert out["reward"] == reward
    assert out["done"]
    assert out["observations"] == []
    assert env.get_metrics()["correct"] == reward


def test_a_row_without_ground_truth_is_refused():
    with pytest.raises(AssertionError, match="reward_spec field is required"):
        AdditionEnv(extras={})
    with pytest.raises(AssertionError, match="ground_truth is required in reward_spec field"):
        AdditionEnv(extras={"reward_spec": {"method": "rule"}})


def test_no_pair_is_in_both_splits_in_either_order():
    train, validation = split_pairs(20, 64, seed=0)
    assert len(train) + len(validation) == 400
    assert 64 <= len(validation) <= 65
    assert not {frozenset(pair) for pair in train} & {frozenset(pair) for pair in validation}


def test_a_validation_split_that_leaves_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="--num_validation=100"):
        split_pairs(3, 100, seed=0)


def test_the_seed_decides_the_files(tmp_path):
    first = pq.read_table(write_dataset(tmp_path / "a", seed=1) / "train.parquet").to_pylist()
    again = pq.read_table(write_dataset(tmp_path / "b", seed=1) / "train.parquet").to_pylist()
    other = pq.read_table(write_dataset(tmp_path / "c", seed=2) / "train.parquet").to_pylist()
    assert first == again
    assert first != other
    row = first[0]
    a, b = (int(word.rstrip("?")) for word in row["prompt"][-1]["content"].split() if word.rstrip("?").isdigit())
    assert row["reward_spec"] == {"ground_truth": str(a + b), "method": "rule"}
    assert row["env_class"] == "addition"


def test_an_existing_model_directory_is_used_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert prepare_model(tmp_path) == tmp_path


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        prepare_model(tmp_path)


def test_a_failed_unpacking_leaves_nothing(tmp_path, monkeypatch):
    def fail(source, target):
        (target / "half").write_text("x")
        raise OSError("disk full")

    monkeypatch.setattr("examples.train.quickstart.prepare_model._gguf_directory", lambda: tmp_path)
    monkeypatch.setattr("examples.train.quickstart.prepare_model._export", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_the_summary_averages_three_steps_at_each_end():
    records = [{"step": 0, "eval/all/avg_score": 0.25}]
    for step, reward in enumerate([0.0, 0.1, 0.2, 0.9, 0.5, 0.6, 0.7], start=1):
        records.append(
            {
                "step": step,
                "reward/avg_raw_reward": reward,
                "timing/step": 30.0 if step == 1 else 10.0,
                "policy/rollout_train_logprobs_abs_diff_mean": 0.04,
            }
        )
    records[1]["timing/cold_start"] = 41.5
    records[-1]["eval/all/avg_score"] = 0.75
    assert summarize(records) == {
        "reward_first": 0.1,
        "reward_last": 0.6,
        "eval_before": 0.25,
        "eval_after": 0.75,
        "steps": 7,
        "cold_start_s": 41.5,
        "step_s": 10.0,
        "logprob_gap_mean": 0.04,
    }


def test_a_summary_of_nothing_has_no_numbers():
    assert summarize([]) == {
        "reward_first": None,
        "reward_last": None,
        "eval_before": None,
        "eval_after": None,
        "steps": 0,
        "cold_start_s": None,
        "step_s": None,
        "logprob_gap_mean": None,
    }
