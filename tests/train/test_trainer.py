"""The synchronous trainer's loop, on fakes."""

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch, pad_training_input_batch
from skyrl.errors import ConfigError
from skyrl.train.trainer import LAUNCH_VARIABLE, RayPPOTrainer
from skyrl.train.utils.callbacks import EVENTS, TrainingCallback
from tests.fakes.inference_engine import FakeInferenceEngine
from tests.fakes.trainer import AlternatingGenerator, make_cfg, make_trainer, train
from tests.fakes.worker_dispatch import FakeWorkerDispatch

EVERY_STEP = {"trainer__ckpt_interval": 1, "trainer__eval_interval": 1, "trainer__eval_before_train": False}


def recorder(events):
    """A callback that notes `(event, global_step, epoch)`."""

    def note(event):
        return lambda self, trainer, given, control: events.append((event, given.global_step, given.epoch))

    return type("Recorder", (TrainingCallback,), {event: note(event) for event in EVENTS})()


class AtStepEnd(TrainingCallback):
    """Sets one flag of the control at the end of one step."""

    def __init__(self, flag, step=1):
        self.flag, self.step = flag, step

    def on_step_end(self, trainer, callback_input, control):
        if callback_input.global_step == self.step:
            setattr(control, self.flag, True)


def saved_steps(folder):
    return sorted(int(path.name.removeprefix("global_step_")) for path in (folder / "ckpt").glob("global_step_*"))


def without_names(events, *names):
    return [event for event in events if event[0] not in names]


def test_a_step_generates_updates_saves_syncs_and_evaluates_in_this_order(tmp_path):
    trainer = train(make_trainer(make_cfg(tmp_path, **EVERY_STEP), tmp_path, prompts=2, val_prompts=1))
    assert trainer.dispatch.calls == [
        ("load", 1),
        ("init_weight_sync_state", None),
        ("save_weights_for_sampler", None),
        ("generate", "train"),
        ("stage_data", "policy"),
        ("forward_backward_from_staged", "policy"),
        ("optim_step", "policy"),
        ("save_checkpoint", "policy"),
        ("save_weights_for_sampler", None),
        ("generate", "eval"),
        ("finalize_pending_saves", "policy"),
    ]


def test_scores_come_before_updates_and_the_critic_learns_before_the_policy(tmp_path):
    cfg = make_cfg(tmp_path, trainer__algorithm__use_kl_loss=True, trainer__critic__model__path="unused")
    cfg.trainer.update_epochs_per_batch = 2
    dispatch = FakeWorkerDispatch({"policy": 1, "critic": 1, "ref": 1})
    train(make_trainer(cfg, tmp_path, prompts=2, dispatch=dispatch))
    passes = [call for call in dispatch.calls if call[0].startswith(("forward", "optim"))]
    update = [("forward_backward_from_staged", "critic"), ("optim_step", "critic")] * 2
    update += [("forward_backward_from_staged", "policy"), ("optim_step", "policy")] * 2
    scores = [("forward_from_staged", "critic"), ("forward", "ref"), ("forward_from_staged", "policy")]
    assert passes == scores + update


def test_events_come_in_order_and_every_epoch_has_its_number(tmp_path):
    events = []
    cfg = make_cfg(tmp_path, **EVERY_STEP, trainer__epochs=2)
    train(make_trainer(cfg, tmp_path, prompts=2, val_prompts=1, callbacks=(recorder(events),)))

    def step(number, epoch):
        names = ("on_step_start", "on_step_end", "on_save", "on_eval_start", "on_eval_end", "on_log")
        return [(name, number, epoch) for name in names]

    assert events == [
        ("on_train_start", 0, 0),
        ("on_epoch_start", 0, 0),
        *step(1, 0),
        ("on_epoch_end", 1, 0),
        ("on_epoch_start", 1, 1),
        *step(2, 1),
        ("on_epoch_end", 2, 1),
        ("on_train_end", 2, 1),
    ]


@pytest.mark.parametrize(("limit", "steps"), [(None, 30), (25, 25), (40, 30)])
def test_steps_are_full_batches_times_epochs_up_to_the_limit(tmp_path, limit, steps):
    cfg = make_cfg(tmp_path, trainer__train_batch_size=10, trainer__epochs=3, trainer__max_training_steps=limit)
    trainer = make_trainer(cfg, tmp_path, prompts=103)
    assert trainer.steps_per_epoch == 10
    assert trainer.total_training_steps == steps
    assert trainer.dispatch.calls == [("load", steps)]


def test_without_training_data_there_are_no_steps_and_train_refuses(tmp_path):
    trainer = make_trainer(make_cfg(tmp_path), tmp_path, prompts=0)
    assert trainer.total_training_steps == 0
    with pytest.raises(ConfigError, match=r"data\.train_data is empty"):
        train(trainer)


def test_one_record_a_step_holds_rewards_updates_times_and_places(tmp_path):
    trainer = train(make_trainer(make_cfg(tmp_path, trainer__epochs=2), tmp_path, prompts=4))
    assert trainer.tracker.steps == [1, 2, 3, 4]
    record = trainer.tracker.records[2][1]
    assert record["reward/avg_raw_reward"] == 0.5
    assert record["reward/avg_pass_at_2"] == 1.0
    assert record["environment/asked"] == 4.0
    assert record["generate/batch_num_seq"] == 4
    assert record["generate/batch_padded_seq_len"] == 4
    assert record["policy/final_loss"] == 0.25
    assert record["policy/grad_norm"] == 1.0
    assert record["weight_sync/version"] == 4.0
    assert (record["trainer/epoch"], record["trainer/global_step"]) == (1, 3)
    timed = {"step", "generate", "train_critic_and_policy", "policy_train", "sync_weights"}
    assert {f"timing/{name}" for name in timed} <= record.keys()


def test_the_time_since_launch_is_logged_with_the_first_step_only(tmp_path, monkeypatch):
    monkeypatch.setenv(LAUNCH_VARIABLE, "1000.0")
    monkeypatch.setattr("skyrl.train.stages.update.time", SimpleNamespace(time=lambda: 1012.5))
    trainer = train(make_trainer(make_cfg(tmp_path), tmp_path, prompts=4))
    times = [record.get("timing/cold_start") for _, record in trainer.tracker.records]
    assert times == [12.5, None]


def test_throughput_counts_real_tokens_by_seconds_and_devices(tmp_path, monkeypatch):
    """Four rows of four tokens in two seconds on four devices."""
    cfg = make_cfg(tmp_path)
    cfg.trainer.placement.policy_num_nodes, cfg.trainer.placement.policy_num_gpus_per_node = 2, 2
    trainer = make_trainer(cfg, tmp_path, prompts=2)
    clock = iter([10.0, 12.0])
    monkeypatch.setattr(trainer.update, "run", lambda batch, timings: {})
    monkeypatch.setattr("skyrl.train.trainer.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    batch = TrainingInputBatch({"attention_mask": torch.ones(4, 4, dtype=torch.int64)})
    assert trainer.train_critic_and_policy(batch) == {"trainer/tokens_per_second_per_gpu": 2.0}


# -- saving


@pytest.mark.parametrize(
    ("interval", "limit", "saves"),
    [(1, 2, [1, 2]), (5, 2, [2]), (5, None, [3]), (2, None, [2, 3]), (-1, 2, [])],
)
def test_every_due_step_and_the_last_are_saved_once(tmp_path, interval, limit, saves):
    cfg = make_cfg(tmp_path, trainer__ckpt_interval=interval, trainer__max_training_steps=limit)
    events = []
    trainer = train(make_trainer(cfg, tmp_path, callbacks=(recorder(events),)))
    assert saved_steps(tmp_path) == saves
    assert trainer.dispatch.count("save_checkpoint") == len(saves)
    assert [step for name, step, _ in events if name == "on_save"] == saves


def test_models_are_exported_when_due_and_once_at_the_end(tmp_path):
    cfg = make_cfg(tmp_path, trainer__hf_save_interval=2, trainer__critic__model__path="unused")
    trainer = train(make_trainer(cfg, tmp_path, dispatch=FakeWorkerDispatch({"policy": 1, "critic": 1})))
    exports = [target for name, target in trainer.dispatch.calls if name == "save_hf_model"]
    folder = tmp_path / "export"
    assert exports == [
        (role, str(folder / f"global_step_{step}" / role)) for step in (2, 3) for role in ("policy", "critic")
    ]


def test_a_last_save_on_shared_gpus_finds_the_engines_asleep(tmp_path):
    class Engine(FakeInferenceEngine):
        async def sleep(self, level=2, tags=None):
            trainer.dispatch.calls.append(("sleep", None))

    dispatch = FakeWorkerDispatch(engines_share_devices=True)
    cfg = make_cfg(tmp_path, trainer__ckpt_interval=5, trainer__max_training_steps=1)
    trainer = make_trainer(cfg, tmp_path, dispatch=dispatch)
    trainer.inference_engine_client = Engine(lambda call: None)
    train(trainer)
    names = [name for name, _ in dispatch.calls]
    assert names[names.index("generate") + 1] == "sleep"
    assert names[-4:] == ["save_weights_for_sampler", "sleep", "save_checkpoint", "finalize_pending_saves"]


# -- callbacks


def test_a_forced_save_acts_in_the_same_step_and_only_there(tmp_path):
    train(make_trainer(make_cfg(tmp_path), tmp_path, callbacks=(AtStepEnd("should_save", 2),)))
    assert saved_steps(tmp_path) == [2]


def test_a_forced_evaluation_needs_data_but_no_interval(tmp_path):
    trainer = train(
        make_trainer(make_cfg(tmp_path), tmp_path, val_prompts=1, callbacks=(AtStepEnd("should_evaluate", 2),))
    )
    scored = [step for step, record in trainer.tracker.records if "eval/all/avg_score" in record]
    assert scored == [2]


def test_a_forced_evaluation_without_data_is_a_config_error(tmp_path):
    trainer = make_trainer(make_cfg(tmp_path), tmp_path, callbacks=(AtStepEnd("should_evaluate"),))
    with pytest.raises(ConfigError, match=r"data\.val_data is empty"):
        train(trainer)


def test_stopping_ends_the_run_after_the_step_with_its_last_save(tmp_path):
    events = []
    cfg = make_cfg(tmp_path, trainer__ckpt_interval=10, trainer__epochs=2)
    callbacks = (AtStepEnd("should_stop"), recorder(events))
    trainer = train(make_trainer(cfg, tmp_path, callbacks=callbacks))
    assert trainer.tracker.steps == [1]
    assert saved_steps(tmp_path) == [1]
    assert [name for name, _, _ in events[-3:]] == ["on_epoch_end", "on_save", "on_train_end"]


def test_what_on_log_changes_reaches_the_tracker(tmp_path):
    class Shortens(TrainingCallback):
        def on_log(self, trainer, callback_input, control):
            callback_input.logs["mine"] = callback_input.logs.pop("reward/avg_raw_reward") * 10

    trainer = train(make_trainer(make_cfg(tmp_path), tmp_path, prompts=2, callbacks=(Shortens(),)))
    (step, record), *rest = trainer.tracker.records
    assert (step, record["mine"], rest) == (1, 5.0, [])
    assert "reward/avg_raw_reward" not in record


def test_step_end_sees_the_trained_batch_and_its_metrics(tmp_path):
    class Looks(TrainingCallback):
        def on_step_end(self, trainer, callback_input, control):
            seen.append((len(callback_input.batch), callback_input.metrics["policy/final_loss"]))

    seen = []
    train(make_trainer(make_cfg(tmp_path), tmp_path, prompts=2, callbacks=(Looks(),)))
    assert seen == [(4, 0.25)]


@pytest.mark.parametrize("method", ["optim_step", "init_weight_sync_state", "finalize_pending_saves"])
def test_the_end_is_announced_once_also_when_training_raises(tmp_path, method):
    events = []
    trainer = make_trainer(
        make_cfg(tmp_path),
        tmp_path,
        dispatch=FakeWorkerDispatch(fails_at=method),
        callbacks=(recorder(events),),
    )
    with pytest.raises(RuntimeError, match=f"{method} failed"):
        train(trainer)
    assert [name for name, _, _ in events].count("on_train_end") == 1
    assert events[-1][0] == "on_train_end"


def test_a_failing_last_callback_still_ends_the_report(tmp_path, monkeypatch):
    class Fails(TrainingCallback):
        def on_train_end(self, trainer, callback_input, control):
            raise ValueError("mine")

    trainer, stopped = make_trainer(make_cfg(tmp_path), tmp_path, prompts=2, callbacks=(Fails(),)), []
    monkeypatch.setattr(trainer.report, "stop", lambda: stopped.append(True))
    with pytest.raises(ValueError, match="mine"):
        train(trainer)
    assert stopped == [True]


def test_a_failed_step_leaves_what_it_measured(tmp_path):
    trainer = make_trainer(make_cfg(tmp_path), tmp_path, dispatch=FakeWorkerDispatch(fails_at="optim_step"))
    with pytest.raises(RuntimeError):
        train(trainer)
    assert trainer.tracker.records == []
    trainer.flush_pending_metrics()
    trainer.flush_pending_metrics()
    assert trainer.tracker.steps == [1]
    record = trainer.tracker.records[0][1]
    assert record["reward/avg_raw_reward"] == 0.5
    assert record["timing/step"] > 0
    assert "policy/final_loss" not in record


# -- evaluation


def test_evaluation_comes_before_training_at_the_interval_and_at_the_end(tmp_path):
    trainer = train(make_trainer(make_cfg(tmp_path, trainer__eval_interval=2), tmp_path, val_prompts=2))
    scored = [step for step, record in trainer.tracker.records if "eval/all/avg_score" in record]
    assert scored == [0, 2, 3]
    assert trainer.tracker.steps == [0, 1, 2, 3]
    assert trainer.report.last_eval_score == 0.5


# -- hooks and parts


def test_a_subclass_shapes_the_rewards_that_are_trained_on(tmp_path):
    class Doubles(RayPPOTrainer):
        def postprocess_generator_output(self, generator_output, uids, *args):
            output, uids = super().postprocess_generator_output(generator_output, uids, *args)
            return {**output, "rewards": [2 * reward for reward in output["rewards"]]}, uids

    trainer = train(make_trainer(make_cfg(tmp_path), tmp_path, prompts=2, cls=Doubles))
    record = trainer.tracker.records[0][1]
    assert record["reward/avg_raw_reward"] == 0.5
    assert record["loss/avg_final_rewards"] == 1.0


def test_a_selection_is_trained_on_while_all_rows_are_measured(tmp_path):
    trainer = make_trainer(make_cfg(tmp_path), tmp_path)
    columns = {"prompt_token_ids": [[1]] * 2, "response_ids": [[2]] * 2, "loss_masks": [[1]] * 2}
    chosen, every = columns | {"rewards": [1.0, 1.0]}, columns | {"rewards": [1.0, 0.0]}
    assert trainer.postprocess_generator_output(chosen, ["a", "a"], every, ["a", "b"]) == (chosen, ["a", "a"])
    assert trainer.all_metrics["reward/avg_raw_reward"] == 0.5
    assert trainer.all_metrics["reward/avg_pass_at_2"] == 0.5


def test_the_generator_can_be_replaced_before_training(tmp_path):
    trainer = make_trainer(make_cfg(tmp_path), tmp_path, prompts=2)
    trainer.generator = AlternatingGenerator(reward=lambda name: 3.0)
    assert train(trainer).tracker.records[0][1]["reward/avg_raw_reward"] == 3.0


def test_prompts_that_do_not_divide_over_the_ranks_are_left_out_of_the_step(tmp_path):
    """Three prompts of one sample on two ranks: two are rolled out."""
    cfg = make_cfg(tmp_path, trainer__train_batch_size=3, generator__n_samples_per_prompt=1)
    trainer = train(make_trainer(cfg, tmp_path, prompts=3, dispatch=FakeWorkerDispatch({"policy": 2})))
    assert [len(uids) for uids in trainer.generator.prompts_seen] == [2]


def test_mini_batches_and_padding_rows_of_a_training_batch(tmp_path):
    """Three prompts with two samples on four ranks: two rows are added, outside of every mini-batch."""
    cfg = make_cfg(tmp_path, trainer__policy_mini_batch_size=1, trainer__critic__model__path="unused")
    trainer = make_trainer(cfg, tmp_path, dispatch=FakeWorkerDispatch({"policy": 4, "critic": 1}))
    trainer.cfg.trainer.critic_mini_batch_size = 8
    output = {
        "prompt_token_ids": [[1]] * 6,
        "response_ids": [[2, 3]] * 6,
        "rewards": [1.0] * 6,
        "loss_masks": [[1, 1]] * 6,
    }
    batch = trainer.convert_to_training_input(output, ["a", "a", "b", "b", "c", "c"])
    assert batch.metadata["policy_mini_batch_boundaries"] == [(0, 2), (2, 4), (4, 6)]
    assert batch.metadata["critic_mini_batch_boundaries"] == [(0, 6)]
    assert (len(batch), batch.metadata["pad_size"]) == (8, 2)
    assert batch["loss_mask"].sum(dim=1).tolist() == [2.0] * 6 + [0.0] * 2
    assert trainer.all_metrics == {"generate/batch_num_seq": 6, "generate/batch_padded_seq_len": 3}


def test_the_kl_controller_counts_real_rows_only(tmp_path):
    """KL 0.5 against a target of 0.1 gives the largest error, 0.2: three rows of 100 raise 0.5 by 0.6 %."""
    cfg = make_cfg(tmp_path, **kl_in_reward())
    trainer = make_trainer(cfg, tmp_path, dispatch=FakeWorkerDispatch({"policy": 1, "ref": 1}))
    columns = {"action_log_probs": -1.0, "base_action_log_probs": -1.5, "rewards": 0.0, "loss_mask": 1.0}
    batch = TrainingInputBatch({name: torch.full((3, 2), value) for name, value in columns.items()})
    batch["valid_rows"] = torch.ones(3, dtype=torch.bool)
    result = trainer.apply_reward_kl_penalty(pad_training_input_batch(batch, 1))
    assert result["rewards"].tolist() == [[-0.25, -0.25]] * 3 + [[0.0, 0.0]]
    assert trainer.all_metrics["loss/avg_kl"] == 0.5
    assert trainer.reward_kl_controller.value == pytest.approx(0.5 * 1.006)


def kl_in_reward():
    return {
        "trainer__algorithm__use_kl_in_reward": True,
        "trainer__algorithm__kl_estimator_type": "k1",
        "trainer__algorithm__kl_ctrl__type": "adaptive",
        "trainer__algorithm__kl_ctrl__kl_target": 0.1,
        "trainer__algorithm__kl_ctrl__horizon": 100,
        "trainer__algorithm__kl_loss_coef": 0.5,
    }


def test_kl_in_the_reward_lowers_it_in_a_whole_step(tmp_path):
    """Two tokens a row, each with KL 0.5 and coefficient 0.5: the mean reward of 0.5 falls to 0."""
    dispatch = FakeWorkerDispatch({"policy": 1, "ref": 1})
    trainer = train(make_trainer(make_cfg(tmp_path, **kl_in_reward()), tmp_path, prompts=2, dispatch=dispatch))
    record = trainer.tracker.records[0][1]
    assert record["reward/avg_raw_reward"] == 0.5
    assert record["loss/avg_final_rewards"] == 0.0
    assert record["loss/kl_loss_coef"] == 0.5


def test_the_reference_follows_at_the_end_of_every_epoch_but_the_last(tmp_path):
    cfg = make_cfg(tmp_path, trainer__update_ref_every_epoch=True, trainer__epochs=3)
    cfg.trainer.algorithm.use_kl_loss = True
    dispatch = FakeWorkerDispatch({"policy": 1, "ref": 1})
    train(make_trainer(cfg, tmp_path, prompts=4, dispatch=dispatch))
    names = [name for name, _ in dispatch.calls if name in ("generate", "copy_policy_to_ref")]
    assert names == ["generate", "generate", "copy_policy_to_ref"] * 2 + ["generate"] * 2
    copied = dispatch.calls.index(("copy_policy_to_ref", None))
    assert dispatch.calls[copied + 1][0] == "save_weights_for_sampler"


def test_a_batch_of_failures_trains_nothing_and_gives_finite_numbers(tmp_path):
    dispatch = FakeWorkerDispatch()
    generator = AlternatingGenerator(dispatch.calls, stop_reason=lambda row: "error")
    trainer = train(make_trainer(make_cfg(tmp_path), tmp_path, prompts=2, dispatch=dispatch, generator=generator))
    (_, batch), record = dispatch.trained[0], trainer.tracker.records[0][1]
    assert not batch["loss_mask"].any()
    assert batch["advantages"].isfinite().all()
    assert record["generate/num_failed"] == 4
    assert all(np.isfinite(value) for value in record.values())


def test_the_training_batch_can_be_dumped(tmp_path):
    trainer = train(make_trainer(make_cfg(tmp_path, trainer__dump_data_batch=True), tmp_path, prompts=2))
    path = tmp_path / "export" / "dumped_data" / "global_step_1_training_input.safetensors"
    (_, trained), dumped = trainer.dispatch.trained[0], TrainingInputBatch.load(path)
    assert torch.equal(dumped["advantages"], trained["advantages"])
    assert dumped.metadata["uids"] == [uid for uid in trainer.generator.prompts_seen[0] for _ in range(2)]


def test_a_dump_goes_to_the_bucket_that_exports_go_to(tmp_path):
    trainer, paths = make_trainer(make_cfg(tmp_path, trainer__export_path="s3://bucket/runs"), tmp_path), []
    trainer.global_step = 3
    trainer.dump_data(SimpleNamespace(save=paths.append))
    assert paths == ["s3://bucket/runs/dumped_data/global_step_3_training_input.safetensors"]


def test_equal_seeds_give_equal_prompts_and_tensors(tmp_path):
    def first_step(seed):
        trainer = train(make_trainer(make_cfg(tmp_path, trainer__seed=seed), tmp_path, prompts=12))
        return trainer.generator.prompts_seen, trainer.dispatch.trained[0][1]

    (prompts, batch), (again, same), (other, _) = first_step(1), first_step(1), first_step(2)
    assert prompts == again != other
    assert batch.keys() == same.keys()
    assert all(torch.equal(batch[key], same[key]) for key in batch)


# -- resuming


def draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_checkpoint_restores_step_controller_and_random_numbers(tmp_path):
    cfg = make_cfg(tmp_path, **kl_in_reward(), trainer__resume_mode="latest")
    roles = {"policy": 1, "ref": 1}
    saving = make_trainer(cfg, tmp_path, dispatch=FakeWorkerDispatch(roles))
    saving.global_step, saving.reward_kl_controller.value = 2, 0.7
    saving.save_checkpoints()
    expected = draws()
    resumed = make_trainer(cfg, tmp_path, dispatch=FakeWorkerDispatch(roles))
    assert (resumed.global_step, resumed.reward_kl_controller.value) == (0, 0.5)
    resumed.load_checkpoints()
    assert resumed.global_step == 2
    assert resumed.reward_kl_controller.value == 0.7
    assert draws() == expected
    assert resumed.dispatch.loaded == ["policy"]


def test_without_a_checkpoint_a_run_starts_at_step_zero(tmp_path):
    trainer = make_trainer(make_cfg(tmp_path, trainer__resume_mode="latest"), tmp_path)
    trainer.load_checkpoints()
    assert trainer.global_step == 0
    assert trainer.dispatch.loaded == []


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
def test_a_resumed_run_sees_the_prompts_that_were_left_and_every_epoch_once(tmp_path, stop):
    """Three epochs of three steps; steps 3 and 6 end an epoch."""
    whole = train(make_trainer(make_cfg(tmp_path / "a", trainer__epochs=3), made(tmp_path / "a")))
    options = {"trainer__epochs": 3, "trainer__ckpt_interval": 1, "trainer__resume_mode": "latest"}
    folder = made(tmp_path / "b")
    first = train(make_trainer(make_cfg(folder, **options, trainer__max_training_steps=stop), folder))
    events = []
    second = train(make_trainer(make_cfg(folder, **options), folder, callbacks=(recorder(events),)))
    assert first.generator.prompts_seen + second.generator.prompts_seen == whole.generator.prompts_seen
    assert second.tracker.steps == list(range(stop + 1, 10))
    epochs = list(range(stop // 3, 3))
    assert [epoch for name, _, epoch in events if name == "on_epoch_start"] == epochs
    assert [epoch for name, _, epoch in events if name == "on_epoch_end"] == epochs


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_finished_run_that_is_resumed_takes_no_step_and_saves_nothing(tmp_path):
    cfg = make_cfg(tmp_path, trainer__ckpt_interval=1, trainer__resume_mode="latest")
    train(make_trainer(cfg, tmp_path))
    again = train(make_trainer(cfg, tmp_path))
    assert again.tracker.steps == []
    assert again.dispatch.count("save_checkpoint") == 0
    assert again.dispatch.count("save_weights_for_sampler") == 1
