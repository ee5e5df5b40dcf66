"""Tables show the worst, the best and seeded others; examples never raise."""

import logging

import pytest

from skyrl.train.utils.progress import FORWARD_VARIABLE
from skyrl.train.utils.trajectory_logging import TrajectoryLogger, pretty_print_example, total_reward


class Tokenizer:
    """One character per id."""

    def decode(self, ids):
        return "".join(chr(i) for i in ids)


class Tracker:
    def __init__(self, supports_tables=True):
        self.supports_tables = supports_tables
        self.tables = []

    def log_samples_to_table(self, key, columns, samples, step):
        self.tables.append((key, tuple(columns), samples, step))


def ids(text):
    return [ord(c) for c in text]


OUTPUT = {
    "response_ids": [ids("abTOOLc"), ids("no"), ids("yes")],
    "loss_masks": [[1, 1, 0, 0, 0, 0, 1], [1, 1], [1, 1, 1]],
    "rewards": [[0.0] * 6 + [0.5], -1.0, 2.0],
}
PROMPTS = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q"}]] * 3


def test_all_rows_are_chosen_when_there_are_few():
    assert TrajectoryLogger().select_sample_indices([0.0, 1.0], 5) == [0, 1]


@pytest.mark.parametrize(("count", "chosen"), [(0, []), (1, [2]), (2, [1, 2])])
def test_the_first_lowest_and_the_first_highest_come_first(count, chosen):
    assert TrajectoryLogger().select_sample_indices([0.5, 3.0, -1.0, -1.0, 3.0], count) == chosen


def test_others_are_random_without_repeats_sorted_and_seeded():
    rewards = [float(i % 7) for i in range(50)]
    first = TrajectoryLogger(sample_seed=1).select_sample_indices(rewards, 10)
    assert first == TrajectoryLogger(sample_seed=1).select_sample_indices(rewards, 10)
    assert first != TrajectoryLogger(sample_seed=2).select_sample_indices(rewards, 10)
    assert first == sorted(set(first)) and len(first) == 10
    assert 0 in first and 6 in first


def test_equal_rewards_do_not_choose_one_row_twice():
    assert TrajectoryLogger().select_sample_indices([1.0, 1.0, 1.0], 1) == [0]
    assert len(TrajectoryLogger().select_sample_indices([1.0] * 5, 3)) == 3


def test_a_trajectory_reads_as_role_blocks():
    text = TrajectoryLogger().format_trajectory(
        PROMPTS[0], OUTPUT["response_ids"][0], OUTPUT["loss_masks"][0], Tokenizer()
    )
    assert text == "[SYSTEM]\nBe brief.\n\n[USER]\nQ\n\n[ASSISTANT]\nab\n\n[USER/TOOL]\nTOOL\n\n[ASSISTANT]\nc"


@pytest.mark.parametrize(
    ("mask", "turns"), [([1, 1, 0, 0, 1], 2), ([0, 0], 0), ([1], 1), ([], 0), ([0, 1, 0, 1, 1], 2)]
)
def test_turns_are_runs_of_trained_tokens(mask, turns):
    assert TrajectoryLogger().count_assistant_turns(mask) == turns


def test_the_table_has_one_row_a_sample():
    tracker = Tracker()
    TrajectoryLogger().log(tracker, 2, PROMPTS, OUTPUT, Tokenizer(), 7, wandb_key="trajectories/eval")
    ((key, columns, samples, step),) = tracker.tables
    assert (key, step) == ("trajectories/eval", 7)
    assert columns == ("step", "idx", "reward", "num_turns", "trajectory")
    assert [row[:4] for row in samples] == [[7, 1, -1.0, 1], [7, 2, 2.0, 1]]
    assert samples[1][4].endswith("[ASSISTANT]\nyes")


def test_the_position_column_can_be_left_out_and_turns_given():
    tracker = Tracker()
    TrajectoryLogger().log(tracker, 3, PROMPTS, OUTPUT, Tokenizer(), None, num_turns_list=[4, 5, 6], include_idx=False)
    ((key, columns, samples, step),) = tracker.tables
    assert (key, step, columns) == ("trajectories/train", 0, ("step", "reward", "num_turns", "trajectory"))
    assert [row[:3] for row in samples] == [[0, 0.5, 4], [0, -1.0, 5], [0, 2.0, 6]]


@pytest.mark.parametrize(("tracker", "count"), [(Tracker(supports_tables=False), 3), (Tracker(), 0), (Tracker(), -1)])
def test_nothing_is_logged_where_it_would_not_show(tracker, count):
    TrajectoryLogger().log(tracker, count, PROMPTS, OUTPUT, Tokenizer(), 1)
    assert tracker.tables == []


def test_a_method_can_be_replaced():
    class Short(TrajectoryLogger):
        def format_trajectory(self, prompt, response_ids, loss_mask, tokenizer):
            return tokenizer.decode(response_ids)

    tracker = Tracker()
    Short().log(tracker, 3, PROMPTS, OUTPUT, Tokenizer(), 1)
    assert tracker.tables[0][2][1][4] == "no"


@pytest.mark.parametrize(("reward", "total"), [(None, None), (1, 1.0), ([0.25, 0.5], 0.75), ([], 0.0)])
def test_rewards_are_summed(reward, total):
    assert total_reward(reward) == total


@pytest.fixture
def shown(caplog, monkeypatch):
    monkeypatch.delenv(FORWARD_VARIABLE, raising=False)
    caplog.set_level(logging.INFO)
    return caplog


@pytest.mark.parametrize(("reward", "text"), [([0.5, 0.25], "0.7500"), (1.0, "1.0000"), (None, "N/A")])
def test_an_example_shows_prompt_response_and_total(shown, reward, text):
    pretty_print_example(logging.getLogger("skyrl"), PROMPTS[0], "forty-two", reward)
    (message,) = shown.messages
    assert "[user] Q" in message and "forty-two" in message and message.endswith(f"Total reward: {text}")
    assert "\x1b" not in message


def test_an_example_on_a_terminal_is_coloured(shown, monkeypatch):
    monkeypatch.setenv(FORWARD_VARIABLE, "1")
    pretty_print_example(logging.getLogger("skyrl"), "Q", "A", 1.0)
    assert "\x1b[32mResponse:\x1b[0m" in shown.messages[0]


@pytest.mark.parametrize("prompt", [None, [{"no": "role"}], 5])
def test_an_odd_example_is_reported_and_does_not_raise(shown, prompt):
    pretty_print_example(logging.getLogger("skyrl"), prompt, "A", 1.0)
    assert "cannot be shown" in shown.text
