"""Dynamic sampling, reward filters and greedy baselines in the trainer's loop, on fakes."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl.algorithms.advantages import AdvantageEstimatorRegistry
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.config.root import make_config
from skyrl.errors import DynamicSamplingError
from skyrl.train.checkpoints import TrainerState
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.callbacks import EVENTS, TrainingCallback
from tests.fakes.inference_engine import FakeInferenceEngine
from tests.fakes.trainer import AlternatingGenerator, make_cfg, make_trainer, train
from tests.fakes.worker_dispatch import FakeWorkerDispatch

KIND = "trainer__algorithm__dynamic_sampling__type"
LIMIT = "trainer__algorithm__dynamic_sampling__max_sample_batches"
FOUR = {"trainer__train_batch_size": 4, "trainer__policy_mini_batch_size": 4}


def in_turn(pattern: str) -> Callable:
    """Rewards for prompts in the order of their rollouts: `g` gives 0 and 1, `f` gives 1 and 1."""
    letters = iter(pattern.replace(" ", "") * 100)
    current = ["g"]

    def reward(name):
        if name.repetition_id == 0 and not name.instance_id.endswith("#greedy"):
            current[0] = next(letters)
        return float(name.repetition_id % 2) if current[0] == "g" else 1.0

    return reward


def by_uid(name):
    """Every third prompt of the data set is flat."""
    return float(name.repetition_id % 2) if int(name.instance_id.rpartition(":")[2]) % 3 else 1.0


class Watcher(TrainingCallback):
    """Notes events and the uids of every batch that was trained on."""

    def __init__(self):
        self.events, self.batches = [], []

    def on_step_end(self, trainer, callback_input, control):
        self.events.append(("on_step_end", callback_input.global_step, callback_input.epoch))
        self.batches.append(callback_input.batch)

    @property
    def uids(self):
        return [batch.metadata["uids"] for batch in self.batches]

    @property
    def prompts(self):
        return [list(dict.fromkeys(uids)) for uids in self.uids]


def _noting(event):
    return lambda self, trainer, given, control: self.events.append((event, given.global_step, given.epoch))


for _event in EVENTS:
    if _event != "on_step_end":
        setattr(Watcher, _event, _noting(_event))


def run(folder, pattern, *, prompts=8, dispatch=None, cls=RayPPOTrainer, **changes):
    """Train with rewards in turn; returns the trainer and what was watched."""
    reward = in_turn(pattern) if isinstance(pattern, str) else pattern
    dispatch, watcher = dispatch or FakeWorkerDispatch(), Watcher()
    cfg = make_cfg(folder, **{KIND: "filter", **changes})
    generator = AlternatingGenerator(dispatch.calls, reward=reward)
    trainer = make_trainer(
        cfg, folder, prompts=prompts, dispatch=dispatch, generator=generator, callbacks=(watcher,), cls=cls
    )
    return train(trainer), watcher


def lines(trainer, step):
    path = Path(trainer.cfg.trainer.run_dir) / "trajectories" / f"train-{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- filter


def test_a_step_collects_good_groups_over_batches_and_trains_on_the_first(tmp_path):
    """Groups A to H of two batches; B, C and H are flat, and four groups are needed."""
    trainer, watcher = run(tmp_path, "gffg gggf", **FOUR)
    (a, _, _, d), (e, f, _, _) = trainer.generator.prompts_seen
    assert watcher.prompts == [[a, d, e, f]]
    assert watcher.uids == [[uid for uid in (a, d, e, f) for _ in range(2)]]
    names = [name for name, step, _ in watcher.events if step == 1]
    assert (names.count("on_step_start"), names.count("on_step_end"), names.count("on_log")) == (1, 1, 1)
    assert [batch["batch_metadata"].global_step for batch in trainer.generator.inputs] == [1, 1]


def test_rewards_are_measured_over_everything_that_was_sampled(tmp_path):
    """Eight groups: five have mean 0.5 and three have mean 1."""
    trainer, _ = run(tmp_path, "gffg gggf", **FOUR)
    ((step, record),) = trainer.tracker.records
    assert step == 1
    assert record["reward/avg_raw_reward"] == pytest.approx((5 * 0.5 + 3 * 1.0) / 8)
    assert record["generate/num_sample_batches"] == 2
    assert record["generate/good_group_share"] == 5 / 8
    assert record["generate/batch_num_seq"] == 8
    assert record["environment/asked"] == 8.0


def test_a_full_first_batch_needs_no_other(tmp_path):
    trainer, watcher = run(tmp_path, "g", prompts=4)
    assert watcher.prompts == trainer.generator.prompts_seen
    assert [record["generate/num_sample_batches"] for _, record in trainer.tracker.records] == [1, 1]


def test_groups_that_were_dropped_are_in_the_trajectory_files_without_an_advantage(tmp_path):
    trainer, watcher = run(tmp_path, "gffg gggf", **FOUR)
    written = lines(trainer, 1)
    trained = [line for line in written if "advantage" in line]
    assert [line["uid"] for line in trained] == watcher.uids[0]
    assert sorted(line["uid"] for line in written) == sorted(
        name.instance_id for batch in trainer.generator.inputs for name in batch["trajectory_ids"]
    )
    assert sorted(line["repetition_id"] for line in written) == [0] * 8 + [1] * 8


def test_engines_sleep_when_the_batch_is_complete(tmp_path):
    class Engine(FakeInferenceEngine):
        async def sleep(self, level=2, tags=None):
            dispatch.calls.append(("sleep", None))

    dispatch = FakeWorkerDispatch(engines_share_devices=True)
    cfg = make_cfg(tmp_path, **{KIND: "filter"})
    generator = AlternatingGenerator(dispatch.calls, reward=in_turn("gf fg"))
    trainer = make_trainer(cfg, tmp_path, prompts=4, dispatch=dispatch, generator=generator)
    trainer.inference_engine_client = Engine(lambda call: None)
    train(trainer)
    names = [name for name, _ in dispatch.calls if name in ("generate", "sleep", "optim_step")]
    assert names == ["generate", "generate", "sleep", "optim_step", "sleep"]


def test_a_batch_is_as_large_as_the_ranks_can_share(tmp_path):
    """Three prompts of two samples on four ranks: two prompts are trained on."""
    changes = {"trainer__train_batch_size": 3, "trainer__policy_mini_batch_size": 3}
    _, watcher = run(tmp_path, "gf g", prompts=6, dispatch=FakeWorkerDispatch({"policy": 4}), **changes)
    assert [len(prompts) for prompts in watcher.prompts] == [2]


def test_failed_rollouts_are_no_samples_of_their_group(tmp_path):
    """The second rollout of each prompt fails: what is left is a group of one."""
    dispatch = FakeWorkerDispatch()
    generator = AlternatingGenerator(dispatch.calls, stop_reason=lambda row: "error" if row == 1 else "stop")
    trainer = make_trainer(
        make_cfg(tmp_path, **{KIND: "filter"}), tmp_path, prompts=2, dispatch=dispatch, generator=generator
    )
    record = train(trainer).tracker.records[0][1]
    assert record["generate/good_group_share"] == 1.0
    assert record["generate/num_failed"] == 1


# -- limits


def test_too_few_good_groups_are_an_error_with_numbers_and_ways_out(tmp_path):
    cfg = make_cfg(tmp_path, **{KIND: "filter", LIMIT: 2})
    generator, watcher = AlternatingGenerator(reward=in_turn("gf ff")), Watcher()
    trainer = make_trainer(cfg, tmp_path, prompts=8, generator=generator, callbacks=(watcher,))
    with pytest.raises(DynamicSamplingError) as caught:
        train(trainer)
    text = str(caught.value)
    assert "dynamic_sampling.max_sample_batches=2: 2 batches are sampled" in text
    assert "1 of 4 groups are good, and 2 are needed (the mean reward is 0.875)" in text
    assert "generator.n_samples_per_prompt" in text and "trainer.train_batch_size" in text
    assert len(lines(trainer, 1)) == 8
    assert [name for name, _, _ in watcher.events[-2:]] == ["on_step_start", "on_train_end"]


def test_a_limit_of_one_batch_fails_at_the_first_that_is_not_enough(tmp_path):
    with pytest.raises(DynamicSamplingError, match="max_sample_batches=1: 1 batches"):
        run(tmp_path, "gf", **{LIMIT: 1})


def test_without_a_limit_sampling_ends_with_the_data(tmp_path, caplog):
    trainer, watcher = run(tmp_path, "gg ff ff ff", **{LIMIT: -1, "trainer__epochs": 2})
    assert trainer.global_step == len(watcher.batches) == 2
    assert len(trainer.generator.inputs) == 8
    assert trainer.total_training_steps == 8
    assert "used up after trainer.epochs=2 passes: step 3 did not get a full batch" in caplog.text
    assert trainer.tracker.steps == [1, 2]
    assert len(lines(trainer, 3)) == 3 * 4


def test_data_that_ends_with_a_full_batch_ends_the_run_with_a_warning_too(tmp_path, caplog):
    trainer, _ = run(tmp_path, "gf fg", prompts=4)
    assert trainer.global_step == 1
    assert "no batch is left for another step" in caplog.text


# -- epochs


def test_a_step_that_goes_on_into_the_next_epoch_meets_no_uid_twice(tmp_path):
    """Two batches an epoch; the second step takes the last of epoch 0 and the first of epoch 1."""
    trainer, watcher = run(tmp_path, "gg gf fg gg", prompts=4, trainer__epochs=2)
    first, second, third, fourth = trainer.generator.prompts_seen
    assert third == [f"epoch1:{uid.removeprefix('epoch1:')}" for uid in third]
    assert watcher.prompts == [first, [second[0], third[1]], fourth]
    assert not any(":" in uid for uid in first + second + fourth)
    assert sorted(uid.removeprefix("epoch1:") for uid in third + fourth) == ["0", "1", "2", "3"]


def test_epochs_follow_the_loader_and_a_step_starts_once(tmp_path):
    _, watcher = run(tmp_path, "gg gf fg gg", prompts=4, trainer__epochs=2, trainer__ckpt_interval=100)
    step = [("on_step_end", 3, 1), ("on_save", 3, 1), ("on_log", 3, 1)]
    assert watcher.events == [
        ("on_train_start", 0, 0),
        ("on_epoch_start", 0, 0),
        *[("on_step_start", 1, 0), ("on_step_end", 1, 0), ("on_log", 1, 0)],
        ("on_step_start", 2, 0),
        ("on_epoch_end", 2, 0),
        ("on_epoch_start", 2, 1),
        *[("on_step_end", 2, 1), ("on_save", 2, 1), ("on_log", 2, 1)],
        ("on_step_start", 3, 1),
        *step,
        ("on_epoch_end", 3, 1),
        ("on_train_end", 3, 1),
    ]


def test_the_reference_follows_when_the_loader_ends_an_epoch_but_the_last(tmp_path):
    """Four batches in two epochs; the first step takes three, the second one."""
    changes = {"trainer__update_ref_every_epoch": True, "trainer__algorithm__use_kl_loss": True}
    dispatch = FakeWorkerDispatch({"policy": 1, "ref": 1})
    run(tmp_path, "gf ff ff gg", prompts=4, dispatch=dispatch, trainer__epochs=2, **changes)
    assert dispatch.count("copy_policy_to_ref") == 0  # the only step ends with the data
    dispatch = FakeWorkerDispatch({"policy": 1, "ref": 1})
    run(tmp_path, "gf ff gg gg", prompts=4, dispatch=dispatch, trainer__epochs=2, **changes)
    names = [name for name, _ in dispatch.calls if name in ("generate", "copy_policy_to_ref")]
    assert names == ["generate"] * 3 + ["copy_policy_to_ref", "generate"]


# -- resuming


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_resumed_run_trains_on_the_batches_of_the_unbroken_one(tmp_path, stop):
    changes = {"prompts": 10, "trainer__epochs": 2}
    _, whole = run(made(tmp_path / "a"), by_uid, **changes)
    folder = made(tmp_path / "b")
    kept = {"trainer__ckpt_interval": 1, "trainer__resume_mode": "latest", **changes}
    _, first = run(folder, by_uid, **kept, trainer__max_training_steps=stop)
    _, second = run(folder, by_uid, **kept)
    assert len(first.uids) == stop
    assert first.uids + second.uids == whole.uids
    assert [event for event in second.events if event[0] == "on_step_end"] == [
        event for event in whole.events if event[0] == "on_step_end" and event[1] > stop
    ]


class Breaking(AlternatingGenerator):
    """Fails at one call."""

    def __init__(self, at, **arguments):
        super().__init__(**arguments)
        self.at = at

    async def generate(self, input_batch):
        if len(self.inputs) + 1 == self.at:
            raise RuntimeError("broken off")
        return await super().generate(input_batch)


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("at", range(2, 10))
def test_a_run_that_breaks_off_while_a_step_collects_goes_on_with_the_same_batches(tmp_path, interval, at):
    """Calls 2, 4, 6 and 8 come when a step has one batch already; what it held is sampled again."""
    _, whole = run(made(tmp_path / "a"), by_uid, prompts=10, trainer__epochs=2)
    folder, watcher = made(tmp_path / "b"), Watcher()
    kept = {"trainer__epochs": 2, "trainer__ckpt_interval": interval, "trainer__resume_mode": "latest"}
    broken = make_trainer(
        make_cfg(folder, **{KIND: "filter", **kept}),
        folder,
        prompts=10,
        generator=Breaking(at, reward=by_uid),
        callbacks=(watcher,),
    )
    with pytest.raises(RuntimeError, match="broken off"):
        train(broken)
    _, rest = run(folder, by_uid, prompts=10, **kept)
    assert (watcher.uids + rest.uids)[-len(rest.uids) :] == whole.uids[-len(rest.uids) :]
    assert whole.uids[: len(watcher.uids)] == watcher.uids
    assert len(watcher.uids) - interval < len(whole.uids) - len(rest.uids) <= len(watcher.uids)


def test_batches_of_a_step_that_was_left_out_are_sampled_again_by_a_longer_run(tmp_path):
    _, whole = run(made(tmp_path / "a"), by_uid, prompts=10, trainer__epochs=2)
    folder = made(tmp_path / "b")
    kept = {"prompts": 10, "trainer__ckpt_interval": 1, "trainer__resume_mode": "latest"}
    shorter, first = run(folder, by_uid, **kept, trainer__epochs=1)
    assert len(shorter.generator.inputs) == 5
    assert len(lines(shorter, len(first.uids) + 1)) > 0
    _, second = run(folder, by_uid, **kept, trainer__epochs=2)
    assert first.uids + second.uids == whole.uids


def test_a_checkpoint_without_a_count_of_batches_took_one_a_step(tmp_path):
    trainer = make_trainer(make_cfg(tmp_path, trainer__epochs=2), tmp_path, prompts=6)
    place = trainer.train_dataloader.state_dict()
    trainer.checkpoints.find_resume = lambda mode, path: SimpleNamespace(path="p", step=4)
    trainer.persist.load = lambda point: (TrainerState(global_step=4), place)
    trainer.load_checkpoints()
    assert (trainer.global_step, trainer.feed.drawn, trainer.epoch) == (4, 4, 1)


# -- replace


def test_flat_groups_are_replaced_by_copies_with_names_of_their_own(tmp_path):
    trainer, watcher = run(tmp_path, "gfgf", prompts=4, **{KIND: "replace", **FOUR})
    a, _, c, _ = trainer.generator.prompts_seen[0]
    (prompts,) = watcher.prompts
    assert [prompts[0], prompts[2]] == [a, c]
    assert sorted([prompts[1], prompts[3]]) == sorted([f"{a}#dup1", f"{c}#dup1"])
    (batch,) = watcher.batches
    assert batch["rewards"].sum(dim=1).tolist() == [0.0, 1.0] * 4
    assert batch.metadata["policy_mini_batch_boundaries"] == [(0, 8)]
    written = lines(trainer, 1)
    assert [line["uid"] for line in written if "advantage" in line] == watcher.uids[0]
    assert [line["instance_id"] for line in written[:8]] == watcher.uids[0]
    assert len(written) == 8 + 4


def test_a_batch_with_too_few_good_groups_is_thrown_away(tmp_path):
    """One good group of four is less than 0.3; the two of the next batch are more."""
    trainer, watcher = run(tmp_path, "gfff gfgf", **{KIND: "replace", **FOUR})
    second = trainer.generator.prompts_seen[1]
    assert {uid.partition("#")[0] for uid in watcher.prompts[0]} == {second[0], second[2]}
    record = trainer.tracker.records[0][1]
    assert record["generate/num_sample_batches"] == 2
    assert record["generate/good_group_share"] == 3 / 8


# -- zero variance and overlong


def test_flat_groups_stay_in_the_batch_but_out_of_the_loss(tmp_path):
    changes = {KIND: None, "trainer__algorithm__zero_variance_filter": True}
    trainer, watcher = run(tmp_path, "gf", prompts=2, **changes)
    record = trainer.tracker.records[0][1]
    assert record["reward/num_zero_variance_filtered"] == 1
    assert record["reward/avg_raw_reward"] == 0.75
    assert watcher.batches[0]["loss_mask"].sum(dim=1).tolist() == [2.0, 2.0, 0.0, 0.0]


class Lengthy(AlternatingGenerator):
    """Responses of one to four tokens, each with reward 1."""

    async def generate(self, input_batch):
        output = await super().generate(input_batch)
        rows = [[80] * (1 + row % 4) for row in range(len(output["rewards"]))]
        ones = [[1] * len(row) for row in rows]
        logprobs = [[-0.5] * len(row) for row in rows]
        rewards = [1.0] * len(rows)
        return output | {"response_ids": rows, "loss_masks": ones, "rollout_logprobs": logprobs, "rewards": rewards}


@dataclass
class OwnPunishment(AlgorithmConfig):
    """Settings as users of upstream declare them."""

    overlong_buffer_len: int | None = 2
    overlong_buffer_penalty_factor: float = 1.0


class Punishes(RayPPOTrainer):
    """A trainer as users of upstream write it: a hook with two arguments that changes the rewards itself."""

    def postprocess_generator_output(self, generator_output, uids):
        algorithm = self.cfg.trainer.algorithm
        limit = self.cfg.generator.sampling_params.max_generate_length
        start, rewards = limit - algorithm.overlong_buffer_len, list(generator_output["rewards"])
        for row, response in enumerate(generator_output["response_ids"]):
            if len(response) > limit:
                rewards[row] = 0.0
            elif len(response) > start:
                over = (len(response) - start) / algorithm.overlong_buffer_len
                rewards[row] -= over * algorithm.overlong_buffer_penalty_factor
        return super().postprocess_generator_output({**generator_output, "rewards": rewards}, uids)


@pytest.mark.parametrize("kind", [None, "filter"])
def test_the_key_and_a_trainer_that_punishes_by_itself_give_equal_rewards(tmp_path, kind):
    def rewards(name, cls, config_cls, **changes):
        folder, watcher = made(tmp_path / name), Watcher()
        cfg = make_cfg(
            folder,
            config_cls=config_cls,
            generator__sampling_params__max_generate_length=3,
            generator__n_samples_per_prompt=4,
            **{KIND: kind},
            **changes,
        )
        trainer = make_trainer(cfg, folder, prompts=2, generator=generator(), callbacks=(watcher,), cls=cls)
        record = train(trainer).tracker.records[0][1]
        return watcher.batches[0]["rewards"].sum(dim=1).tolist(), record["reward/avg_raw_reward"]

    def generator():
        made_rewards = Lengthy()
        if kind is not None:  # rewards that differ, or the filter drops every group
            original = made_rewards.generate

            async def generate(batch):
                output = await original(batch)
                return output | {"rewards": [1.0 + (row == 0) for row in range(len(output["rewards"]))][:4] * 2}

            made_rewards.generate = generate
        return made_rewards

    base = make_config()
    by_key = rewards("key", RayPPOTrainer, base, trainer__algorithm__overlong_buffer_len=2)
    by_trainer = rewards("trainer", Punishes, make_config(algorithm_cls=OwnPunishment))
    assert by_key == by_trainer
    extra = 0.0 if kind is None else 1.0
    assert by_key[0] == [1.0 + extra, 0.5, 0.0, 0.0] * 2
    assert by_key[1] == pytest.approx(sum(by_key[0]) / 8)


def test_overlong_punishment_comes_before_the_zero_variance_filter(tmp_path):
    """All rewards are 1 before the punishment, and differ after it."""
    folder, watcher = tmp_path, Watcher()
    cfg = make_cfg(
        folder,
        generator__sampling_params__max_generate_length=3,
        trainer__algorithm__overlong_buffer_len=2,
        trainer__algorithm__zero_variance_filter=True,
    )
    trainer = train(make_trainer(cfg, folder, prompts=2, generator=Lengthy(), callbacks=(watcher,)))
    record = trainer.tracker.records[0][1]
    # Lengths 1, 2 | 3, 4 give 1, 0.5 | 0, 0.
    assert record["reward/num_zero_variance_filtered"] == 1
    assert (watcher.batches[0]["loss_mask"].sum(dim=1) > 0).tolist() == [True, True, False, False]


# -- greedy baselines


@pytest.fixture
def greedy_estimator():
    """An estimator with the trait, whatever is built in."""

    def estimator(token_level_rewards, response_mask, baseline_scores=None, **kwargs):
        advantages = token_level_rewards.sum(dim=1, keepdim=True) * response_mask
        return advantages, advantages

    traits = replace(AdvantageEstimatorRegistry.traits("grpo"), needs_baseline=True)
    AdvantageEstimatorRegistry.register("greedy_test", estimator, traits=traits)
    yield {"trainer__algorithm__advantage_estimator": "greedy_test"}
    AdvantageEstimatorRegistry.unregister("greedy_test")


class Columns(RayPPOTrainer):
    """Keeps the columns that training reads."""

    seen: list

    def postprocess_generator_output(self, generator_output, uids, *args, **kwargs):
        output, uids = super().postprocess_generator_output(generator_output, uids, *args, **kwargs)
        self.__dict__.setdefault("seen", []).append(output)
        return output, uids


def greedy_reward(name):
    """Samples of a prompt get 0 and 1; its greedy rollout gets the prompt's number."""
    uid, _, kind = name.instance_id.partition("#")
    return float(uid.rpartition(":")[2]) if kind == "greedy" else float(name.repetition_id % 2)


def test_every_prompt_has_a_greedy_rollout_in_the_same_call_that_stays_out_of_the_batch(tmp_path, greedy_estimator):
    trainer, watcher = run(tmp_path, greedy_reward, prompts=2, cls=Columns, **{KIND: None, **greedy_estimator})
    (inputs,) = trainer.generator.inputs
    names = [name.to_string() for name in inputs["trajectory_ids"]]
    one, two = watcher.prompts[0]
    assert names == [f"{one}_0", f"{one}_1", f"{two}_0", f"{two}_1", f"{one}#greedy_0", f"{two}#greedy_0"]
    assert [params["temperature"] for params in inputs["sampling_params"]] == [1.0] * 4 + [0.0] * 2
    assert trainer.seen[0]["baseline_scores"] == [float(uid) for uid in (one, one, two, two)]
    record = trainer.tracker.records[0][1]
    assert record["reward/avg_greedy_baseline"] == 0.5
    assert record["reward/avg_raw_reward"] == 0.5
    assert record["generate/batch_num_seq"] == 4
    greedy = [line for line in lines(trainer, 1) if line["uid"].endswith("#greedy")]
    found = [(line["uid"], line["reward"]) for line in greedy]
    assert found == [(f"{uid}#greedy", float(uid)) for uid in (one, two)]
    assert all("advantage" not in line for line in greedy)


def test_evaluations_have_no_greedy_rollouts(tmp_path, greedy_estimator):
    cfg = make_cfg(tmp_path, **greedy_estimator, trainer__eval_interval=1, trainer__eval_before_train=False)
    trainer = train(make_trainer(cfg, tmp_path, prompts=2, val_prompts=1))
    assert [len(batch["prompts"]) for batch in trainer.generator.inputs] == [6, 2]


def test_baselines_stay_with_their_prompts_through_dynamic_sampling(tmp_path, greedy_estimator):
    def reward(name):
        value = greedy_reward(name)
        flat = "#" not in name.instance_id and int(name.instance_id) % 2 == 0
        return 1.0 if flat else value

    for number, kind in enumerate(("filter", "replace")):
        trainer, watcher = run(
            made(tmp_path / str(number)), reward, prompts=4, cls=Columns, **{KIND: kind, **greedy_estimator}
        )
        for uids, columns in zip(watcher.uids, trainer.seen, strict=True):
            assert columns["baseline_scores"] == [float(uid.partition("#")[0]) for uid in uids]
        greedy = [line["uid"] for step in range(1, trainer.global_step + 1) for line in lines(trainer, step)]
        assert sum(uid.endswith("#greedy") for uid in greedy) == 4


def test_a_failed_greedy_rollout_gives_no_baseline(tmp_path, greedy_estimator):
    cfg = make_cfg(tmp_path, **greedy_estimator)
    generator = AlternatingGenerator(reward=greedy_reward, stop_reason=lambda row: "error" if row == 4 else "stop")
    trainer = train(make_trainer(cfg, tmp_path, prompts=2, generator=generator, cls=Columns))
    second = trainer.generator.prompts_seen[0][1]
    scores = trainer.seen[0]["baseline_scores"]
    assert [score != score for score in scores] == [True, True, False, False]
    assert scores[2:] == [float(second)] * 2
    assert trainer.tracker.records[0][1]["reward/avg_greedy_baseline"] == float(second)
    assert trainer.tracker.records[0][1]["generate/num_failed"] == 0


def test_the_baseline_is_punished_as_its_samples_are(tmp_path, greedy_estimator):
    """Rows have 1, 2, 3, 4 tokens, and the greedy ones 1 and 2; the limit is 3, the buffer 2."""
    cfg = make_cfg(
        tmp_path,
        **greedy_estimator,
        generator__sampling_params__max_generate_length=3,
        trainer__algorithm__overlong_buffer_len=2,
    )
    trainer = train(make_trainer(cfg, tmp_path, prompts=2, generator=Lengthy(), cls=Columns))
    assert trainer.seen[0]["rewards"] == [1.0, 0.5, 0.0, 0.0]
    assert trainer.seen[0]["baseline_scores"] == [1.0, 1.0, 0.5, 0.5]
