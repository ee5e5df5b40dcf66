"""An experiment from its config to its end, on fakes."""

import asyncio
from pathlib import Path

import pytest
import yaml

from skyrl.errors import ConfigError, DatasetError, ModelLoadError
from skyrl.train.entrypoints import main_base
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils.callbacks import TrainingCallback
from skyrl.train.utils.tracking import Tracking
from tests.fakes.environments import EnvScript, registered
from tests.fakes.trainer import TOKENIZER, AlternatingGenerator, RecordingTracker, make_cfg, make_engine, write_prompts
from tests.fakes.worker_dispatch import FakeModelGroups, FakeWorkerDispatch


class FakeExp(BasePPOExp):
    """Only servers, workers and tracker are fakes; generator, trainer and environment loop are the real ones."""

    def get_tokenizer(self, padding_side="left"):
        return TOKENIZER

    def get_colocate_pg(self, timeout=0):
        return None

    def get_tracker(self):
        return RecordingTracker()

    def get_worker_classes(self):
        return "classes"

    def get_inference_client(self):
        self.client = make_engine()
        self.torn_down = 0

        async def teardown():
            self.torn_down += 1

        self.client.teardown = teardown
        return self.client


@pytest.fixture
def groups(monkeypatch):
    """Groups that `start_models` hands out."""
    made = FakeModelGroups(FakeWorkerDispatch())
    monkeypatch.setattr("skyrl.backends.skyrl_train.workers.build.start_models", lambda cfg, classes, pg: made)
    return made


def make_exp(folder, cls=FakeExp, prompts=2, **changes):
    write_prompts(folder / "train.jsonl", prompts)
    write_prompts(folder / "val.jsonl", 1)
    return cls(make_cfg(folder, **changes))


def run(exp):
    with registered(EnvScript(rewards=(0.75,))):
        return exp.run()


def test_a_run_trains_and_returns_its_last_evaluation(tmp_path, groups):
    exp = make_exp(tmp_path, trainer__eval_interval=1)
    assert run(exp) == 0.75
    assert exp.tracker.steps == [0, 1]
    assert exp.tracker.records[1][1]["reward/avg_raw_reward"] == 0.75
    assert groups.dispatch.count("optim_step") == 1
    assert groups.shut_down
    assert (exp.tracker.finished, exp.tracker.errors, exp.torn_down) == (1, [], 1)


def test_a_run_without_evaluation_returns_nothing_and_leaves_its_config(tmp_path, groups):
    exp = make_exp(tmp_path)
    assert run(exp) is None
    stored = yaml.safe_load((Path(exp.cfg.trainer.run_dir) / "config.yaml").read_text())
    assert stored["trainer"]["train_batch_size"] == 2
    assert exp.trainer.trajectory_logger is not None


def test_a_failure_reaches_the_tracker_with_what_the_step_measured_and_everything_stops(tmp_path, groups):
    groups.dispatch.fails_at = "optim_step"
    exp = make_exp(tmp_path)
    with pytest.raises(RuntimeError, match="optim_step failed"):
        run(exp)
    assert exp.tracker.errors == [("optim_step failed", 1)]
    assert exp.tracker.records[0][1]["reward/avg_raw_reward"] == 0.75
    assert groups.shut_down
    assert (exp.tracker.finished, exp.torn_down) == (1, 1)


def test_a_tracker_that_fails_too_does_not_hide_the_error_of_the_run(tmp_path, groups, caplog):
    class BrokenTracker(RecordingTracker):
        def log(self, data, step, commit=False):
            raise OSError("disk full")

    class Exp(FakeExp):
        def get_tracker(self):
            return BrokenTracker()

    groups.dispatch.fails_at = "optim_step"
    exp = make_exp(tmp_path, Exp)
    with pytest.raises(RuntimeError, match="optim_step failed"):
        run(exp)
    assert exp.tracker.errors == [("optim_step failed", 1)]
    assert "metrics of step 1 are lost" in caplog.text


def test_engines_that_do_not_start_end_the_run_and_stop_the_workers(tmp_path, groups):
    class Exp(FakeExp):
        def get_inference_client(self):
            raise ConfigError("no engine")

    exp = make_exp(tmp_path, Exp)
    with pytest.raises(ConfigError, match="no engine"):
        run(exp)
    assert groups.shut_down
    assert exp.tracker.errors == [("no engine", 0)]


def test_on_shared_gpus_workers_start_after_the_engines(tmp_path, groups, monkeypatch):
    class Exp(FakeExp):
        def get_colocate_pg(self, timeout=0):
            return "gpus"

        def get_inference_client(self):
            order.append("engines")
            return super().get_inference_client()

    def start(cfg, classes, pg):
        order.append(f"workers on {pg} with {classes}")
        return groups

    order = []
    monkeypatch.setattr("skyrl.backends.skyrl_train.workers.build.start_models", start)
    run(make_exp(tmp_path, Exp))
    assert order == ["engines", "workers on gpus with classes"]


def test_a_resumed_run_goes_on_in_its_folder_and_a_fresh_one_takes_the_next(tmp_path, groups):
    options = {"trainer__ckpt_interval": 1, "trainer__resume_mode": "latest", "prompts": 4}
    first = make_exp(tmp_path, trainer__max_training_steps=1, **options)
    run(first)
    resumed = make_exp(tmp_path, trainer__run_dir=str(tmp_path / "elsewhere"), **options)
    run(resumed)
    fresh = make_exp(tmp_path, **options | {"trainer__resume_mode": "none"})
    run(fresh)
    folder = str(tmp_path / "export" / "runs" / "test_run")
    assert [exp.cfg.trainer.run_dir for exp in (first, resumed, fresh)] == [folder, folder, folder + "-2"]
    assert [exp.tracker.steps for exp in (first, resumed, fresh)] == [[1], [2], [1, 2]]


def test_an_environment_that_nobody_registered_is_refused_before_servers_start(tmp_path, groups):
    exp = make_exp(tmp_path)
    with pytest.raises(ConfigError, match=r"environment\.env_class=scripted: must be one of"):
        exp.run()
    assert not hasattr(exp, "client")
    (tmp_path / "train.jsonl").write_text(
        '{"prompt": [{"role": "user", "content": "1"}]}\n'
        '{"prompt": [{"role": "user", "content": "2"}], "env_class": "gsm9k"}\n'
    )
    exp = FakeExp(make_cfg(tmp_path))
    with pytest.raises(DatasetError, match=r"train\.jsonl, row 2, column 'env_class': no environment 'gsm9k'"):
        run(exp)


def test_a_generator_of_ones_own_may_need_no_environment(tmp_path, groups):
    class Exp(FakeExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return AlternatingGenerator()

    assert make_exp(tmp_path, Exp).run() is None


def test_too_few_training_prompts_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"1 usable prompts, fewer than trainer\.train_batch_size=2"):
        make_exp(tmp_path, prompts=1)


def test_evaluation_data_is_loaded_only_where_something_evaluates(tmp_path):
    assert make_exp(tmp_path, trainer__eval_before_train=False).eval_dataset is None
    assert make_exp(tmp_path, trainer__eval_interval=1, data__val_data=[]).eval_dataset is None
    for changes in ({"trainer__eval_interval": 1, "trainer__eval_before_train": False}, {}):
        assert len(make_exp(tmp_path, **changes).eval_dataset) == 1


def test_a_callback_may_force_an_evaluation_that_no_interval_asks_for(tmp_path, groups):
    class Force(TrainingCallback):
        def on_step_end(self, trainer, callback_input, control):
            control.should_evaluate = True

    class Exp(FakeExp):
        def get_trainer(self, *args):
            trainer = super().get_trainer(*args)
            trainer.add_callback(Force())
            return trainer

    exp = make_exp(tmp_path, Exp, trainer__eval_interval=-1)
    assert run(exp) == 0.75
    assert exp.tracker.steps == [1]  # and none before training


class Bare(BasePPOExp):
    """Has a config and nothing else."""

    def __init__(self, cfg):
        self.cfg = cfg


def test_a_path_without_tokenizer_is_a_model_error(tmp_path):
    with pytest.raises(ModelLoadError, match=r"trainer\.policy\.model\.path='.*' has no usable tokenizer"):
        Bare(make_cfg(tmp_path, trainer__policy__model__path=str(tmp_path))).get_tokenizer()


def test_a_tokenizer_without_padding_pads_with_its_end_token_on_the_left(tmp_path):
    TOKENIZER.__class__(tokenizer_object=TOKENIZER.backend_tokenizer, eos_token=TOKENIZER.eos_token).save_pretrained(
        tmp_path
    )
    tokenizer = Bare(make_cfg(tmp_path, trainer__policy__model__path=str(tmp_path))).get_tokenizer()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == TOKENIZER.eos_token_id
    assert tokenizer.padding_side == "left"


def test_a_strategy_that_is_not_built_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.strategy='megatron' is not built yet"):
        Bare(make_cfg(tmp_path, trainer__strategy="megatron")).get_worker_classes()


def test_the_tracker_writes_into_the_folder_of_the_run(tmp_path):
    tracker = Bare(make_cfg(tmp_path)).get_tracker()
    assert isinstance(tracker, Tracking)
    assert tracker.metrics_path == str(tmp_path / "export" / "runs" / "test_run" / "metrics.jsonl")
    tracker.finish()


def test_the_config_as_text_is_yaml(tmp_path):
    text = BasePPOExp.get_cfg_as_str(make_cfg(tmp_path, trainer__epochs=7))
    assert yaml.safe_load(text)["trainer"]["epochs"] == 7


def test_upstreams_names_are_here():
    assert (Path(main_base.config_dir) / "recipe").is_dir()
    assert callable(main_base.validate_cfg)


def test_the_command_runs_the_experiment(monkeypatch):
    ran = []
    monkeypatch.setattr("skyrl.train.entrypoints.launch.run_hydra", ran.append)
    main_base.main()
    assert ran == [BasePPOExp]


def test_servers_sleep_after_their_start_on_shared_gpus_and_stop_at_the_end(tmp_path, monkeypatch):
    class Engine:
        slept = closed = 0

        async def sleep(self):
            self.slept += 1
            self.loop = asyncio.get_running_loop()

        async def teardown(self):
            assert asyncio.get_running_loop() is self.loop
            self.closed += 1

    class Setup:
        stopped = 0

        def shutdown(self):
            self.stopped += 1

    class Exp(FakeExp):
        get_inference_client = BasePPOExp.get_inference_client

    engine, setup = Engine(), Setup()
    monkeypatch.setattr(
        "skyrl.backends.skyrl_train.inference_servers.setup.build_new_inference_client",
        lambda cfg, tokenizer, pg: (engine, setup),
    )
    exp = make_exp(tmp_path, Exp)
    assert exp.get_inference_client() is engine
    assert engine.slept == 0
    exp.colocate_pg = "gpus"
    exp.get_inference_client()
    assert (engine.slept, engine.closed) == (1, 1)
    exp._cleanup.close()
    assert setup.stopped == 2
