from __future__ import annotations

import re
import sys

import pytest

from examples.train.gsm8k import gsm8k_dataset
from examples.train.gsm8k.gsm8k_dataset import final_number, hub_rows, made_rows
from skyrl_gym.envs.gsm8k.env import GSM8kEnv


def test_the_reference_number_stands_after_the_last_marker():
    assert final_number("5 * 3 = <<5*3=15>>15 coins\n#### 1,015") == "1015"
    with pytest.raises(ValueError, match="no ####"):
        final_number("fifteen")


def test_a_problem_made_here_is_solved_by_adding_or_subtracting():
    for row in made_rows(64, "train", num_shots=0, largest=9, seed=0):
        question = row["prompt"][-1]["content"]
        a, b = map(int, re.findall(r"\d+", question))
        expected = a - b if "gives away" in question else a + b
        assert row["reward_spec"]["ground_truth"] == str(expected)
        assert expected >= 0


def test_worked_examples_earn_the_reward_they_show():
    for row in made_rows(16, "train", num_shots=2, largest=9, seed=1):
        roles = [message["role"] for message in row["prompt"]]
        assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
        truth = row["reward_spec"]["ground_truth"]
        assert GSM8kEnv(extras=row).step(f"#### {truth}")["reward"] == 1.0
        assert re.fullmatch(r"#### \d+", row["prompt"][2]["content"])


def test_splits_differ_and_repeat_by_seed():
    options = {"num_shots": 1, "largest": 9, "seed": 0}
    assert made_rows(8, "train", **options) == made_rows(8, "train", **options)
    assert made_rows(8, "train", **options) != made_rows(8, "validation", **options)


def test_without_the_hub_the_script_says_what_to_do(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(SystemExit, match="no route") as stopped:
        hub_rows("train")
    assert "--made_here" in str(stopped.value)


def test_hub_rows_have_the_common_shape(monkeypatch):
    example = {"question": "How many?", "answer": "2 + 2 = 4\n#### 4"}
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: [example])
    (row,) = hub_rows("train")
    assert row["reward_spec"] == {"method": "rule", "ground_truth": "4"}
    assert row["prompt"][0]["content"].startswith("How many? ")
    assert "####" in row["prompt"][0]["content"]


def test_the_script_writes_both_files(tmp_path, monkeypatch, capsys):
    arguments = ["gsm8k_dataset.py", "--made_here", "--train_size", "3", "--validation_size", "2"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--output_dir", str(tmp_path)])
    gsm8k_dataset.main()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.parquet", "validation.parquet"]
    assert capsys.readouterr().out.strip() == str(tmp_path)
