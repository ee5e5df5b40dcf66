"""Scores by data source, and the files of an evaluation."""

import asyncio
import json
import logging
import math

import pytest

from skyrl.errors import ConfigError
from skyrl.train.dataset.dataloader import build_dataloader
from skyrl.train.dataset.dataset import PromptDataset
from skyrl.train.evaluate import dump_directory, evaluate, evaluate_step_wise, source_name
from skyrl.train.utils.trajectory_logging import TrajectoryLogger
from tests.fakes.trainer import TOKENIZER, AlternatingGenerator, RecordingTracker, make_cfg, write_prompts

FIRST_SAMPLE = {"0": 1.0, "1": 0.0, "2": -1.0}
"""Rewards of the first sample of each prompt; the second one gets 0."""

DUMPED = {
    "input_prompt",
    "output_response",
    "score",
    "stop_reason",
    "env_class",
    "env_extras",
    "data_source",
    "trajectory_id",
    "step",
}


def by_prompt(name):
    return FIRST_SAMPLE[name.instance_id] if name.repetition_id == 0 else 0.0


def run(folder, generator, step=7, prompts=3, **options):
    """Evaluate prompts 0 and 2 of openai/gsm8k and prompt 1 of no source, two at a time, with two samples."""
    changes = options.pop("changes", {})
    cfg = make_cfg(folder, trainer__eval_batch_size=2, **changes)
    dataset = PromptDataset(
        write_prompts(folder / "val.jsonl", prompts, ("openai/gsm8k", None)), TOKENIZER, 100, num_workers=0
    )
    loader = build_dataloader(cfg, dataset, is_train=False)
    return asyncio.run(evaluate(loader, generator, cfg, step, TOKENIZER, **options))


def read_lines(path):
    """Parse JSON lines; NaN and infinities are no JSON."""

    def refuse(constant):
        raise AssertionError(constant)

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_every_source_and_all_rows_get_scores(tmp_path):
    """gsm8k: 1, 0, -1, 0 over two prompts; unknown: 0, 0; rollout metrics: 4 and 2 rows, a mean by rows."""
    metrics = run(tmp_path, AlternatingGenerator(reward=by_prompt))
    assert {key: value for key, value in metrics.items() if key.count("/") == 2 and "num_tokens" not in key} == {
        "eval/openai_gsm8k/avg_score": 0.0,
        "eval/openai_gsm8k/pass_at_2": 0.5,
        "eval/openai_gsm8k/mean_positive_reward": 0.25,
        "eval/unknown/avg_score": 0.0,
        "eval/unknown/pass_at_2": 0.0,
        "eval/unknown/mean_positive_reward": 0.0,
        "eval/all/avg_score": 0.0,
        "eval/all/pass_at_2": pytest.approx(1 / 3),
        "eval/all/mean_positive_reward": pytest.approx(1 / 6),
    }
    assert metrics["eval/all/environment/asked"] == pytest.approx((4 * 4 + 2 * 2) / 6)
    assert metrics["eval/all/generate/avg_num_tokens"] == 2.0
    assert metrics["timing/eval_generate"] > 0


@pytest.mark.parametrize(
    ("source", "name"), [("openai/gsm8k", "openai_gsm8k"), (None, "unknown"), ("digits", "digits")]
)
def test_sources_are_named_without_slashes(source, name):
    assert source_name(source) == name


def test_prompts_are_asked_with_the_sampling_of_evaluations(tmp_path):
    generator = AlternatingGenerator()
    run(tmp_path, generator, changes={"generator__eval_sampling_params__temperature": 0.25})
    assert [len(inputs["prompts"]) for inputs in generator.inputs] == [4, 2]
    assert {inputs["sampling_params"]["temperature"] for inputs in generator.inputs} == {0.25}
    metadata = generator.inputs[0]["batch_metadata"]
    assert (metadata.training_phase, metadata.global_step) == ("eval", 7)


def test_failed_rollouts_count_nowhere(tmp_path):
    """Rows 0 and 2 of each batch, all first samples, fail: all that is left are second samples, with reward 1."""
    generator = AlternatingGenerator(stop_reason=lambda row: "stop" if row % 2 else "error")
    metrics = run(tmp_path, generator)
    assert metrics["eval/all/avg_score"] == 1.0
    assert metrics["eval/unknown/avg_score"] == 1.0


def test_dumps_are_one_json_object_a_row_with_the_promised_keys(tmp_path):
    metrics = run(tmp_path, AlternatingGenerator(reward=by_prompt))
    folder = tmp_path / "export" / "dumped_evals" / "global_step_7_evals"
    assert sorted(path.name for path in folder.iterdir()) == [
        "aggregated_results.jsonl",
        "openai_gsm8k.jsonl",
        "unknown.jsonl",
    ]
    rows = read_lines(folder / "openai_gsm8k.jsonl")
    assert all(set(row) == DUMPED for row in rows)
    assert [(row["trajectory_id"], row["score"], row["step"]) for row in rows] == [
        ("0_0", 1.0, 7),
        ("0_1", 0.0, 7),
        ("2_0", -1.0, 7),
        ("2_1", 0.0, 7),
    ]
    assert rows[0]["input_prompt"] == TOKENIZER.decode([70, 71])
    assert rows[0]["output_response"] == TOKENIZER.decode([80, 81])
    assert rows[0]["env_extras"] == {"data_source": "openai/gsm8k"}
    assert [row["data_source"] for row in read_lines(folder / "unknown.jsonl")] == [None, None]
    (aggregated,) = read_lines(folder / "aggregated_results.jsonl")
    assert aggregated == {key: value for key, value in metrics.items() if not key.startswith("timing/")}


def test_numbers_that_json_has_not_are_null_in_the_dumps(tmp_path):
    run(tmp_path, AlternatingGenerator(reward=lambda name: math.nan), prompts=1)
    folder = tmp_path / "export" / "dumped_evals" / "global_step_7_evals"
    assert [row["score"] for row in read_lines(folder / "openai_gsm8k.jsonl")] == [None, None]
    assert read_lines(folder / "aggregated_results.jsonl")[0]["eval/all/avg_score"] is None


def test_without_dumps_only_the_trajectories_are_written(tmp_path):
    run(tmp_path, AlternatingGenerator(), changes={"trainer__dump_eval_results": False})
    assert not (tmp_path / "export" / "dumped_evals").exists()
    lines = read_lines(tmp_path / "export" / "runs" / "test_run" / "trajectories" / "eval-000007.jsonl")
    assert [(line["uid"], line["phase"]) for line in lines] == [(uid, "eval") for uid in "001122"]


def test_an_evaluation_without_training_has_a_folder_of_its_own(tmp_path):
    run(tmp_path, AlternatingGenerator(), step=None)
    rows = read_lines(tmp_path / "export" / "dumped_evals" / "eval_only" / "unknown.jsonl")
    assert [row["step"] for row in rows] == [None, None]


def test_dumps_go_to_the_bucket_that_exports_go_to(tmp_path):
    cfg = make_cfg(tmp_path, trainer__export_path="s3://bucket/runs")
    assert dump_directory(cfg, 3) == "s3://bucket/runs/dumped_evals/global_step_3_evals"


def test_no_prompts_give_no_metrics_and_a_warning(tmp_path, caplog):
    cfg, generator = make_cfg(tmp_path), AlternatingGenerator()
    assert asyncio.run(evaluate([], generator, cfg, 1, TOKENIZER)) == {}
    assert "holds no prompts: nothing was evaluated" in caplog.text
    assert generator.inputs == []


def test_the_last_batch_is_shown_and_the_tracker_gets_a_table(tmp_path, caplog):
    class Table(RecordingTracker):
        supports_tables = True

        def log_samples_to_table(self, key, columns, samples, step):
            self.records.append((step, {key: len(samples)}))

    tracker = Table()
    changes = {"trainer__print_example_interval": 1, "trainer__num_logger_eval_samples": 3}
    with caplog.at_level(logging.INFO):
        run(
            tmp_path,
            AlternatingGenerator(),
            trajectory_logger=TrajectoryLogger(),
            tracker=tracker,
            changes=changes,
        )
    assert "[user] n2" in caplog.text
    assert "[user] n0" not in caplog.text
    assert tracker.records == [(7, {"trajectories/eval": 3})]


def test_progress_counts_prompts(tmp_path):
    class Counter:
        done = 0

        def advance(self, count):
            self.done += count

    counter = Counter()
    run(tmp_path, AlternatingGenerator(), progress=counter)
    assert counter.done == 3


def test_rows_per_turn_are_refused():
    with pytest.raises(ConfigError, match="step_wise_trajectories=true is not built yet"):
        asyncio.run(evaluate_step_wise())
