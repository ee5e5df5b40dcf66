"""What an operator sees of a step."""

import json
import logging
from pathlib import Path

import pytest
import torch

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.stages.report import StepReport, log_rollouts, record_step, reward_metrics
from skyrl.train.stages.rollout import RolledOut
from skyrl.train.utils.tracking import Tracking
from skyrl.train.utils.trajectory_logging import TrajectoryLogger
from tests.fakes.trainer import TOKENIZER, RecordingTracker, make_cfg


def make_rolled(reasons=("stop", "stop")):
    inputs = {
        "prompts": [[{"role": "user", "content": "n"}]] * 2,
        "env_classes": ["digits"] * 2,
        "trajectory_ids": [TrajectoryID("a", 0), TrajectoryID("a", 1)],
    }
    output = {
        "prompt_token_ids": [[70]] * 2,
        "response_ids": TOKENIZER(["x", "yz"])["input_ids"],
        "rewards": [-1.0, 3.0],
        "loss_masks": [[1], [1, 1]],
        "stop_reasons": list(reasons),
    }
    return RolledOut(inputs=inputs, output=output, uids=["a", "a"], metrics={})


class Table(RecordingTracker):
    supports_tables = True

    def log_samples_to_table(self, key, columns, samples, step):
        self.records.append((step, {key: (columns, samples)}))


def test_rewards_are_those_of_the_rollouts_that_did_not_fail():
    rolled = make_rolled()
    assert reward_metrics(rolled.output, rolled.uids, 2) == {
        "reward/avg_pass_at_2": 1.0,
        "reward/avg_raw_reward": 1.0,
        "reward/mean_positive_reward": 1.5,
        "generate/num_failed": 0,
    }
    rolled = make_rolled(("stop", "error"))
    assert reward_metrics(rolled.output, rolled.uids, 2) == {
        "reward/avg_pass_at_2": 0.0,
        "reward/avg_raw_reward": -1.0,
        "reward/mean_positive_reward": 0.0,
        "generate/num_failed": 1,
    }


@pytest.mark.parametrize(("interval", "shown"), [(2, [2, 4]), (-1, [])])
def test_examples_come_at_their_interval(tmp_path, caplog, interval, shown):
    cfg, steps = make_cfg(tmp_path, trainer__print_example_interval=interval), []
    for step in range(1, 5):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            log_rollouts(cfg, RecordingTracker(), None, make_rolled(), TOKENIZER, step)
        steps += [step] if "Total reward: -1.0000" in caplog.text else []
    assert steps == shown


def test_the_training_table_has_no_index_column(tmp_path):
    cfg, tracker = make_cfg(tmp_path, trainer__num_logger_train_samples=1), Table()
    log_rollouts(cfg, tracker, TrajectoryLogger(), make_rolled(), TOKENIZER, 5)
    ((step, tables),) = tracker.records
    columns, samples = tables["trajectories/train"]
    assert (step, columns) == (5, ("step", "reward", "num_turns", "trajectory"))
    assert samples == [[5, -1.0, 1, "[USER]\nn\n\n[ASSISTANT]\nx"]]


def test_trajectories_are_recorded_with_what_training_made_of_them_without_padding_rows(tmp_path):
    cfg, rolled = make_cfg(tmp_path), make_rolled()
    batch = TrainingInputBatch(
        {"loss_mask": torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]), "advantages": torch.tensor([[9.0, -0.5]] * 3)}
    )
    record_step(cfg, rolled, rolled.output, batch, 3)
    path = Path(cfg.trainer.run_dir) / "trajectories" / "train-000003.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["reward"] for line in lines] == [-1.0, 3.0]
    assert [line["advantage"] for line in lines] == [-0.5, 4.25]


def test_the_last_evaluation_is_remembered_and_a_step_is_one_line(tmp_path, caplog):
    report = StepReport(make_cfg(tmp_path), RecordingTracker(), total_steps=9)
    assert report.last_eval_score is None
    with caplog.at_level(logging.INFO):
        report.step_done(3, {"eval/all/avg_score": 0.25, "policy/grad_norm": 1.5, "other": 1})
        report.step_done(4, {"reward/avg_raw_reward": 0.5})
    assert report.last_eval_score == 0.25
    assert caplog.messages == ["Step 3/9: eval 0.25, grad norm 1.5", "Step 4/9: reward 0.5"]


def test_curves_are_drawn_when_the_report_ends(tmp_path):
    cfg = make_cfg(tmp_path)
    tracker = Tracking("p", "r", [], run_dir=cfg.trainer.run_dir)
    report = StepReport(cfg, tracker, total_steps=1)
    report.start()
    tracker.log({"reward/avg_raw_reward": 1.0}, 1, commit=True)
    report.stop()
    tracker.finish()
    assert [path.name for path in (Path(cfg.trainer.run_dir) / "plots").iterdir()] == ["reward.png"]


def test_a_run_without_monitor_reports_no_use_of_machines(tmp_path):
    report = StepReport(make_cfg(tmp_path), RecordingTracker(), total_steps=None)
    assert report.system_metrics() == {}
    with report.phase("generate", 1) as shown:
        shown.advance(3)
    report.stop()
