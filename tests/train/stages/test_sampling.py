"""What a step has sampled so far; the loop around it is tested in `tests/train/test_trainer_sampling.py`."""

import copy
import math

import pytest

from skyrl.errors import ConfigError, DynamicSamplingError
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.stages.rolled_out import RolledOut
from skyrl.train.stages.sampling import DynamicSampler, handle_dynamic_sampling, in_epoch
from tests.fakes.trainer import make_cfg

KEY = "trainer__algorithm__dynamic_sampling__"


def make_rolled(groups, *, reasons=None, named=False):
    """`{"a": [1, 0]}` is one group of two rollouts."""
    uids = [uid for uid, rewards in groups.items() for _ in rewards]
    rewards = [float(reward) for group in groups.values() for reward in group]
    ids = [TrajectoryID(uid, row) for row, uid in enumerate(uids)]
    output = {
        "prompt_token_ids": [[1]] * len(uids),
        "response_ids": [[row] for row in range(len(uids))],
        "rewards": rewards,
        "loss_masks": [[1]] * len(uids),
    }
    if reasons:
        output["stop_reasons"] = reasons
    if named:
        output["trajectory_ids"] = list(ids)
    inputs = {"prompts": [[]] * len(uids), "env_classes": ["e"] * len(uids), "trajectory_ids": ids}
    return RolledOut(inputs=inputs, output=output, uids=uids, metrics={"m": 1.0})


def make_sampler(tmp_path, kind, **changes):
    algorithm = make_cfg(
        tmp_path, **{f"{KEY}type": kind}, **{f"{KEY}{name}": value for name, value in changes.items()}
    ).trainer.algorithm
    return DynamicSampler(lambda: algorithm, seed=1)


def test_switched_off_it_hands_everything_on(tmp_path):
    sampler, rolled = make_sampler(tmp_path, None), make_rolled({"a": [1, 1]})
    assert sampler.add(rolled, num_prompts=2, global_step=1) is rolled
    assert sampler.drain() is None


def test_filter_keeps_what_it_collected_until_the_batch_is_full(tmp_path):
    sampler = make_sampler(tmp_path, "filter")
    assert sampler.add(make_rolled({"a": [1, 0], "b": [0, 0]}), num_prompts=2, global_step=1) is None
    chosen = sampler.add(make_rolled({"c": [0, 1], "d": [1, 0]}), num_prompts=2, global_step=1)
    assert chosen.uids == ["a", "a", "c", "c"]
    assert chosen.output["rewards"] == [1.0, 0.0, 0.0, 1.0]
    assert chosen.measured.uids == list("aabbccdd")
    (dropped,) = chosen.aside
    assert dropped.uids == list("bbdd")
    assert chosen.metrics["generate/num_sample_batches"] == 2
    assert chosen.metrics["generate/good_group_share"] == 0.75
    assert sampler.drain() is None


def test_one_batch_is_not_joined_and_keeps_its_metrics(tmp_path):
    rolled = make_rolled({"a": [1, 0]})
    chosen = make_sampler(tmp_path, "filter").add(rolled, num_prompts=1, global_step=1)
    assert chosen.measured is rolled
    assert chosen.aside == ()
    assert chosen.metrics == {"m": 1.0, "generate/num_sample_batches": 1.0, "generate/good_group_share": 1.0}


def test_copies_have_trajectories_of_their_own_name(tmp_path):
    rolled = make_rolled({"a": [1, 0], "b": [0, 0]}, named=True)
    before = copy.deepcopy(rolled.output)
    chosen = make_sampler(tmp_path, "replace").add(rolled, num_prompts=2, global_step=1)
    assert chosen.uids == ["a", "a", "a#dup1", "a#dup1"]
    names = [("a", 0), ("a", 1), ("a#dup1", 0), ("a#dup1", 1)]
    expected = [TrajectoryID(*name) for name in names]
    assert chosen.inputs["trajectory_ids"] == chosen.output["trajectory_ids"] == expected
    assert chosen.output["response_ids"] == [[0], [1], [0], [1]]
    assert rolled.output == before
    assert [part.uids for part in chosen.aside] == [["b", "b"]]


def test_the_draw_follows_seed_and_step(tmp_path):
    groups = {str(number): [0, number % 2] for number in range(40)}

    def draw(step):
        sampler = make_sampler(tmp_path, "replace")
        return sampler.add(make_rolled(groups), num_prompts=40, global_step=step).uids

    assert draw(1) == draw(1) != draw(2)


def test_failures_are_no_rewards_and_a_batch_of_them_is_named(tmp_path):
    sampler = make_sampler(tmp_path, "filter", max_sample_batches=1)
    with pytest.raises(DynamicSamplingError, match=r"0 of 1 groups are good, and 1 are needed \(every rollout failed"):
        sampler.add(make_rolled({"a": [1, 0]}, reasons=["error", "timeout"]), num_prompts=1, global_step=1)
    assert sampler.drain().uids == ["a", "a"]


def test_the_share_that_replacing_needs_is_in_the_error(tmp_path):
    sampler = make_sampler(tmp_path, "replace", max_sample_batches=1)
    with pytest.raises(DynamicSamplingError, match=r"1 of the 4 groups .* above min_replace_ratio=0\.3"):
        sampler.add(make_rolled({"a": [1, 0], "b": [0, 0], "c": [0, 0], "d": [1, 1]}), num_prompts=4, global_step=1)


def test_a_reward_that_is_no_number_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"row 1 \(uid 'a'\) is nan"):
        make_sampler(tmp_path, "filter").add(make_rolled({"a": [1, math.nan]}), num_prompts=1, global_step=1)


def test_prompts_of_another_epoch_get_its_number():
    prompts = [{"uid": "3", "prompt": []}]
    assert in_epoch(prompts, 2) == [{"uid": "epoch2:3", "prompt": []}]
    assert prompts[0]["uid"] == "3"


# -- upstream's form


def handled(groups, config, state=None):
    rolled = make_rolled(groups)
    return handle_dynamic_sampling(rolled.output, rolled.uids, config, state)


def test_upstreams_filter_hands_its_state_from_batch_to_batch():
    config = {"type": "filter", "train_batch_size": 4, "n_samples_per_prompt": 2}
    first = {"A": [1, 0], "B": [0, 0], "C": [1, 1], "D": [0, 1]}
    output, uids, again, state = handled(first, config)
    assert (again, uids, len(output["rewards"])) == (True, list("AABBCCDD"), 8)
    assert (state["num_prompts_in_batch"], state["collected_uids"]) == (2, ["A", "A", "D", "D"])
    before = copy.deepcopy(state)
    second = {"E": [1, 0], "F": [0, 1], "G": [1, 0], "H": [1, 1]}
    output, uids, again, after = handled(second, config, state)
    assert (again, uids, after) == (False, list("AADDEEFF"), None)
    assert output["rewards"] == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    assert state == before


def test_upstreams_filter_survives_a_batch_without_a_good_group():
    config = {"type": "filter", "train_batch_size": 1}
    _, _, again, state = handled({"A": [0, 0]}, config)
    assert (again, state) == (True, {"num_prompts_in_batch": 0})
    assert handled({"B": [0, 1]}, config, state)[1] == ["B", "B"]


def test_upstreams_replace_gives_new_names():
    config = {"type": "replace", "min_replace_ratio": 0.3}
    groups = {"a": [0, 1], "b": [0, 0]}
    output, uids, again, state = handled(groups, config)
    assert (uids, again, state) == (["a", "a", "a#dup1", "a#dup1"], False, None)
    assert output["response_ids"] == [[0], [1], [0], [1]]
    assert handled(groups, config | {"min_replace_ratio": 0.5})[2] is True
    assert handled(groups, {"type": None})[1:] == (["a", "a", "b", "b"], False, None)


def test_upstreams_form_refuses_an_unknown_type_and_a_uid_that_comes_back():
    with pytest.raises(ConfigError, match=r"dynamic_sampling\.type=filtr: .*did you mean filter"):
        handled({"A": [0, 1]}, {"type": "filtr", "train_batch_size": 1})
    config = {"type": "filter", "train_batch_size": 3}
    _, _, _, state = handled({"A": [0, 1], "B": [1, 0]}, config)
    with pytest.raises(ValueError, match="uid 'B' was collected from an earlier batch"):
        handled({"B": [0, 1], "C": [0, 1]}, config, state)
    assert handled({"B": [1, 1], "C": [0, 1]}, config, state)[1] == list("AABBCC")
