"""Named parts of the reward: from the environment's steps to columns."""

from __future__ import annotations

import re

import pytest

from skyrl.train.generators.columns import concatenate_generator_outputs, slice_generator_output
from skyrl.train.generators.output_checks import validate_generator_output
from skyrl.train.generators.reward_parts import join_reward_columns, reward_columns, zero_parts_on_non_stop
from tests.fakes.environments import EnvScript
from tests.fakes.generators import make_batch, make_generator, roll_out
from tests.fakes.inference_engine import FakeInferenceEngine, Reply, script_of
from tests.fakes.tokenizers import make_byte_tokenizer

TOKENIZER = make_byte_tokenizer()
AGAIN = [{"role": "user", "content": "again"}]


def answers(*steps: dict) -> EnvScript:
    """An environment whose step i returns `metadata=steps[i]` and that ends with the last."""

    def on_step(env, action):
        turn = len(env.actions) - 1
        done = turn + 1 == len(steps)
        return {"observations": [] if done else AGAIN, "reward": 1.0, "done": done, "metadata": steps[turn]}

    return EnvScript(on_step=on_step)


def play(script: EnvScript, *replies: str, rows: int = 1, **changes):
    engine = FakeInferenceEngine(script_of(*(replies or ("a",)), tokenizer=TOKENIZER), TOKENIZER)
    return roll_out(make_generator(engine, TOKENIZER, **changes), script, make_batch(rows))


def test_rows_become_columns_in_the_order_of_the_first_row():
    columns = reward_columns([{"correct": 1.0, "format": 0.5}, {"format": 0.25, "correct": 0.0}])
    assert columns == {"correct": [1.0, 0.0], "format": [0.5, 0.25]}
    assert list(columns) == ["correct", "format"]


def test_no_names_no_columns():
    assert reward_columns([{}, {}]) is None
    assert reward_columns([]) is None


def test_a_part_that_a_row_does_not_name_is_zero():
    columns = reward_columns([{"format": 0.5}, {"correct": 1.0, "format": 1.0}, {}])
    assert columns == {"format": [0.5, 1.0, 0.0], "correct": [0.0, 1.0, 0.0]}


def test_parts_are_summed_over_the_steps_of_an_episode():
    script = answers({"rewards": {"format": 0.5}}, {}, {"rewards": {"format": 0.25, "correct": True}})
    output = play(script, "a", "b", "c")
    assert output["reward_components"] == {"format": [0.75], "correct": [1.0]}
    assert output["rollouts"][0].reward_parts == {"format": 0.75, "correct": 1.0}
    validate_generator_output(1, output)


def test_batched_rollouts_have_parts_too():
    output = play(answers({"rewards": {"correct": 1}}), batched=True, max_turns=1)
    assert output["rewards"] == [1.0] and output["reward_components"] == {"correct": [1.0]}


def test_environments_without_parts_give_no_column():
    for metadata in ({}, {"rewards": None}, {"other": 1}):
        assert play(answers(metadata))["reward_components"] is None
    assert play(EnvScript())["reward_components"] is None


def test_a_failed_try_leaves_nothing_of_its_parts():
    def on_step(env, action):
        if len(env.script.made) == 1 and len(env.actions) == 2:
            raise ValueError("boom")
        done = len(env.actions) == 2
        return {"observations": AGAIN, "reward": 0.0, "done": done, "metadata": {"rewards": {"correct": 1.0}}}

    output = play(EnvScript(on_step=on_step), "a", "b", "c", "d", max_attempts=2)
    assert output["rollouts"][0].attempt == 2
    assert output["reward_components"] == {"correct": [2.0]}


def test_a_rollout_that_failed_or_was_too_long_has_zeros():
    def on_step(env, action):
        if env.extras.get("fails"):
            raise ValueError("boom")
        return {"observations": [], "reward": 1.0, "done": True, "metadata": {"rewards": {"correct": 1.0}}}

    engine = FakeInferenceEngine(script_of("a", tokenizer=TOKENIZER), TOKENIZER)
    batch = make_batch(3, env_extras=[{}, {"fails": True}, {}])
    batch["prompts"] = [*batch["prompts"][:2], [{"role": "user", "content": "x" * 200}]]
    generator = make_generator(engine, TOKENIZER, max_input_length=100, max_attempts=1)
    output = roll_out(generator, EnvScript(on_step=on_step), batch)
    assert output["stop_reasons"] == ["stop", "error", "length"]
    assert output["reward_components"] == {"correct": [1.0, 0.0, 0.0]}
    validate_generator_output(3, output)


def test_environments_may_name_other_parts():
    def on_step(env, action):
        parts = {"correct": 1.0} if env.extras["max_turns"] == 2 else {"right": 2.0}
        return {"observations": [], "reward": 1.0, "done": True, "metadata": {"rewards": parts}}

    engine = FakeInferenceEngine(script_of("a", tokenizer=TOKENIZER), TOKENIZER)
    batch = make_batch(3, env_extras=[{"max_turns": 2}, {"max_turns": 3}, {"max_turns": 2}])
    output = roll_out(make_generator(engine, TOKENIZER), EnvScript(on_step=on_step), batch)
    assert output["reward_components"] == {"correct": [1.0, 0.0, 1.0], "right": [0.0, 2.0, 0.0]}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([1.0], r"step\(\) returned metadata\['rewards'\]=\[1\.0\]; it must be a dict"),
        ({1: 1.0}, "must be a dict of named numbers"),
        ({"": 1.0}, "must be a dict of named numbers"),
        ({"correct": "yes"}, r"metadata\['rewards'\]\['correct'\] 'yes', not a number"),
        ({"correct": float("nan")}, r"metadata\['rewards'\]\['correct'\] nan"),
        ({"correct": float("inf")}, r"metadata\['rewards'\]\['correct'\] inf"),
    ],
)
def test_what_is_no_number_fails_the_rollout(parts, message: str):
    failure = play(answers({"rewards": parts}), max_attempts=1)["rollouts"][0].failure
    assert failure.where == "env.step"
    assert re.search(message, failure.message), failure.message


def test_zero_rewards_for_cut_rows_zero_their_parts():
    engine = FakeInferenceEngine(lambda call: Reply(ids=[65], stop_reason="length"), TOKENIZER)
    generator = make_generator(engine, TOKENIZER, zero_reward_on_non_stop=True)
    output = roll_out(generator, answers({"rewards": {"correct": 1.0}}), make_batch())
    assert sum(output["rewards"][0]) == 0.0 and output["reward_components"] == {"correct": [0.0]}
    assert zero_parts_on_non_stop({"a": [1.0, 2.0, 3.0]}, ["stop", "length", "error"]) == {"a": [1.0, 0.0, 0.0]}
    assert zero_parts_on_non_stop(None, ["stop"]) is None


def rows(count: int, parts=None, reasons=None, **changes):
    return {
        "prompt_token_ids": [[1]] * count,
        "response_ids": [[5]] * count,
        "rewards": [1.0] * count,
        "loss_masks": [[1]] * count,
        "stop_reasons": reasons or ["stop"] * count,
        "reward_components": parts,
    } | changes


def test_batches_are_cut_and_joined_with_their_parts():
    first, second = rows(2, {"a": [1.0, 2.0], "b": [3.0, 4.0]}), rows(1, {"b": [6.0], "a": [5.0]})
    joined = concatenate_generator_outputs([first, second])
    assert joined["reward_components"] == {"a": [1.0, 2.0, 5.0], "b": [3.0, 4.0, 6.0]}
    assert slice_generator_output(joined, [2, 0])["reward_components"] == {"a": [5.0, 1.0], "b": [6.0, 3.0]}


def test_a_batch_of_failures_joins_with_zeros():
    failed = rows(2, None, ["error", "timeout"], loss_masks=[[0], [0]])
    for parts in ([failed, rows(1, {"a": [1.0]})], [rows(1, {"a": [1.0]}), failed]):
        joined = concatenate_generator_outputs(parts)["reward_components"]
        assert joined in ({"a": [0.0, 0.0, 1.0]}, {"a": [1.0, 0.0, 0.0]})
    assert join_reward_columns([failed, failed]) is None
    assert join_reward_columns([rows(1), rows(2)]) is None


def test_batches_with_other_parts_join_with_zeros():
    joined = concatenate_generator_outputs([rows(1, {"a": [1.0]}), rows(2), rows(1, {"b": [2.0], "a": [3.0]})])
    assert joined["reward_components"] == {"a": [1.0, 0.0, 0.0, 3.0], "b": [0.0, 0.0, 0.0, 2.0]}


def test_baseline_scores_are_cut_and_joined():
    nan = float("nan")
    joined = concatenate_generator_outputs([rows(2, baseline_scores=[1.0, nan]), rows(1, baseline_scores=[0.5])])
    assert str(joined["baseline_scores"]) == str([1.0, nan, 0.5])
    assert slice_generator_output(joined, [2, 0])["baseline_scores"] == [0.5, 1.0]
    assert concatenate_generator_outputs([rows(1, baseline_scores=[1.0]), rows(1)])["baseline_scores"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_components": {"a": [1.0]}}, r"reward_components\['a'\] has 1 rows, response_ids has 2"),
        ({"reward_components": {"a": [1.0, float("nan")]}}, r"row 1: reward_components\['a'\] is nan"),
        ({"reward_components": {"a": [float("inf"), 0.0]}}, r"row 0: reward_components\['a'\] is inf"),
        ({"baseline_scores": [1.0]}, "baseline_scores has 1 rows, response_ids has 2"),
        ({"baseline_scores": [1.0, float("inf")]}, "baseline_scores holds an infinite score"),
    ],
)
def test_columns_of_a_users_generator_are_checked(changes, message: str):
    with pytest.raises(AssertionError, match=message):
        validate_generator_output(2, rows(2, **changes))


def test_sound_columns_of_a_users_generator_pass():
    nan = float("nan")
    validate_generator_output(2, rows(2, {"a": [1.0, nan]}, ["stop", "error"], baseline_scores=[nan, 1.0]))
