"""From dataset rows to checked columns."""

import asyncio

import pytest

from skyrl.errors import ConfigError
from skyrl.train.stages.rollout import RolloutStage, drop_uneven_tail
from tests.fakes.trainer import AlternatingGenerator, make_cfg


def rows(count):
    return [{"prompt": [], "env_class": None, "env_extras": {}, "uid": str(i)} for i in range(count)]


@pytest.mark.parametrize(
    ("prompts", "samples", "dp_lcm", "kept"),
    [(10, 4, 6, 9), (7, 3, 6, 6), (7, 8, 4, 7), (3, 1, 1, 3)],
)
def test_the_tail_is_dropped_until_the_rollouts_divide(prompts, samples, dp_lcm, kept):
    assert drop_uneven_tail(rows(prompts), samples=samples, dp_lcm=dp_lcm) == rows(prompts)[:kept]


def test_a_batch_of_which_nothing_would_be_left_is_refused():
    with pytest.raises(ConfigError, match="can't be divided over 6 data-parallel ranks; use a multiple of 3 prompts"):
        drop_uneven_tail(rows(2), samples=4, dp_lcm=6)


def test_each_phase_has_its_own_samples_and_sampling_parameters(tmp_path):
    cfg = make_cfg(
        tmp_path,
        generator__eval_n_samples_per_prompt=1,
        generator__sampling_params__temperature=0.75,
        generator__eval_sampling_params__temperature=0.0,
    )
    stage = RolloutStage(AlternatingGenerator(), cfg)
    inputs, uids = stage.prepare(rows(2), phase="train", global_step=4)
    assert uids == ["0", "0", "1", "1"]
    assert inputs["sampling_params"]["temperature"] == 0.75
    assert inputs["env_classes"] == ["scripted"] * 4
    assert inputs["batch_metadata"].global_step == 4
    inputs, uids = stage.prepare(rows(2), phase="eval", global_step=None)
    assert uids == ["0", "1"]
    assert inputs["sampling_params"]["temperature"] == 0.0
    assert [stage.samples_per_prompt(phase) for phase in ("train", "eval")] == [2, 1]


def test_rollout_metrics_leave_the_columns(tmp_path):
    rolled = asyncio.run(
        RolloutStage(AlternatingGenerator(), make_cfg(tmp_path)).run(rows(1), phase="train", global_step=1)
    )
    assert rolled.metrics == {"environment/asked": 2.0}
    assert "rollout_metrics" not in rolled.output
    assert rolled.output["rewards"] == [0.0, 1.0]
    assert rolled.uids == ["0", "0"]


def test_a_generator_needs_no_metrics_but_one_row_per_rollout(tmp_path):
    stage = RolloutStage(AlternatingGenerator(), make_cfg(tmp_path))
    inputs, uids = stage.prepare(rows(1), phase="train", global_step=1)
    output = asyncio.run(stage.generator.generate(inputs))
    assert stage.check(inputs, output | {"rollout_metrics": None}, uids).metrics == {}
    del output["rollout_metrics"]
    assert stage.check(inputs, output, uids).metrics == {}
    output["response_ids"] = output["response_ids"][:1]
    with pytest.raises(AssertionError, match="1 rows for 2 prompts"):
        stage.check(inputs, output, uids)
