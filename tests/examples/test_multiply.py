from __future__ import annotations

import pytest

from examples.train.multiply.env import NO_BOX, WRONG, MultiplyEnv, parse_answer
from examples.train.multiply.multiply_dataset import make_prompt, make_rows


def make_env(truth="56", max_turns=3):
    return MultiplyEnv(extras={"reward_spec": {"method": "rule", "ground_truth": truth}, "max_turns": max_turns})


@pytest.mark.parametrize(
    ("text", "answer"),
    [(r"\boxed{56}", "56"), (r"so \boxed{1} no, \boxed{ 1,056 }", "1056"), ("56", None), (r"\boxed{}", ""), ("", None)],
)
def test_the_last_box_is_the_answer(text, answer):
    assert parse_answer(text) == answer


def test_a_right_answer_ends_the_episode_with_full_reward():
    out = make_env().step(r"7 * 8 = \boxed{56}")
    assert (out["reward"], out["done"], out["observations"]) == (1.0, True, [])
    assert out["metadata"] == {"parsed_answer": "56"}


def test_a_wrong_answer_gets_another_turn_and_half_reward_only_at_the_end():
    env = make_env(max_turns=2)
    first = env.step(r"\boxed{54}")
    assert (first["reward"], first["done"]) == (0.0, False)
    assert first["observations"] == [{"role": "user", "content": WRONG}]
    last = env.step(r"\boxed{55}")
    assert (last["reward"], last["done"], last["observations"]) == (0.5, True, [])
    assert env.get_metrics() == {"solved": 0.0, "turns": 2}


def test_an_answer_without_a_box_is_asked_for_one_and_earns_nothing():
    env = make_env(max_turns=2)
    assert env.step("56")["observations"] == [{"role": "user", "content": NO_BOX}]
    assert env.step("56")["reward"] == 0.0


def test_a_right_second_answer_earns_full_reward():
    env = make_env(max_turns=5)
    env.step("hm")
    assert env.step(r"\boxed{56}")["reward"] == 1.0
    assert env.get_metrics() == {"solved": 1.0, "turns": 2}


def test_five_turns_unless_the_row_says_otherwise():
    assert MultiplyEnv(extras={"reward_spec": {"ground_truth": "6"}}).max_turns == 5


@pytest.mark.parametrize("extras", [None, {}, {"reward_spec": None}])
def test_a_row_without_reward_spec_is_refused(extras):
    with pytest.raises(AssertionError, match="reward_spec field is required"):
        MultiplyEnv(extras=extras)


def test_rows_hold_operands_of_the_chosen_size_and_their_product():
    rows = make_rows(50, "train", num_digits=2, num_shots=0, max_turns=4, seed=3)
    for row in rows:
        a, b = (int(word.rstrip("?")) for word in row["prompt"][-1]["content"].split()[2::2])
        assert 10 <= a <= 99
        assert 10 <= b <= 99
        assert row["reward_spec"]["ground_truth"] == str(a * b)
        assert row["max_turns"] == 4
    assert rows == make_rows(50, "train", num_digits=2, num_shots=0, max_turns=4, seed=3)
    assert rows != make_rows(50, "validation", num_digits=2, num_shots=0, max_turns=4, seed=3)


def test_solved_examples_come_first_and_are_right():
    prompt = make_prompt(3, 4, [(2, 5)])
    assert [message["role"] for message in prompt] == ["system", "user", "assistant", "user"]
    assert prompt[2]["content"] == r"\boxed{10}"
    assert prompt[3]["content"] == "What is 3 * 4?"


def test_the_environment_solves_its_own_examples():
    prompt = make_prompt(3, 4, [(2, 5)])
    assert make_env("10").step(prompt[2]["content"])["reward"] == 1.0
