"""Curves are found by name, survive gaps and few points, and end up as pictures."""

import errno
import json
import os
import threading

import pytest
from PIL import Image

from skyrl.train.utils import plots
from skyrl.train.utils.plots import draw_plots, find_curves
from skyrl.utils import storage


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def write(rows):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def whole_row(step):
    return {
        "step": step,
        "reward/avg_raw_reward": step / 10,
        "reward/avg_pass_at_8": 1.0,
        "generate/avg_num_tokens": 12.0,
        "policy/rollout_train_logprobs_abs_diff_mean": 0.03,
        "timing/step": 20.0,
        "timing/generate": 8.0,
    }


def test_curves_skip_missing_and_null_values():
    rows = [
        {"step": 0, "eval/all/avg_score": 0.1},
        {"step": 1, "reward/avg_raw_reward": 0.2, "reward/avg_pass_at_8": None},
        {"step": 2, "reward/avg_raw_reward": None},
        {"step": 3, "reward/avg_raw_reward": 0.4, "reward/avg_raw_reward_extra": 9.0},
    ]
    reward = next(plot for plot in plots.PLOTS if plot.name == "reward")
    assert find_curves(rows, reward.keys) == {
        "reward/avg_raw_reward": ([1, 3], [0.2, 0.4]),
        "eval/all/avg_score": ([0], [0.1]),
    }


@pytest.mark.parametrize("count", [1, 2, 100])
def test_four_pictures_are_drawn_from_any_number_of_points(metrics, tmp_path, count):
    drawn = draw_plots(metrics([whole_row(step) for step in range(1, count + 1)]), str(tmp_path / "plots"))
    assert [os.path.basename(path) for path in drawn] == [
        "reward.png",
        "response_length.png",
        "logprob_gap.png",
        "timing.png",
    ]
    for path in drawn:
        with Image.open(path) as picture:
            assert picture.size == (800, 450)


def test_a_plot_without_points_is_left_out(metrics, tmp_path):
    drawn = draw_plots(metrics([{"step": 1, "timing/step": 3.0}]), str(tmp_path / "plots"))
    assert [os.path.basename(path) for path in drawn] == ["timing.png"]


def test_no_metrics_give_no_plots(metrics, tmp_path):
    assert draw_plots(str(tmp_path / "absent.jsonl"), str(tmp_path / "plots")) == []
    assert draw_plots(metrics([]), str(tmp_path / "plots")) == []
    assert not (tmp_path / "plots").exists()


def test_a_full_disk_costs_a_picture_and_not_the_run(metrics, tmp_path, monkeypatch, caplog):
    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage, "write_atomic", full)
    assert draw_plots(metrics([whole_row(1)]), str(tmp_path / "plots")) == []
    assert "reward.png could not be written" in caplog.text


def test_drawing_works_in_another_thread(metrics, tmp_path):
    path, drawn = metrics([whole_row(1)]), []
    thread = threading.Thread(target=lambda: drawn.extend(draw_plots(path, str(tmp_path / "plots"))))
    thread.start()
    thread.join()
    assert len(drawn) == 4
