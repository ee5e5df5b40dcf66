"""Evaluation without training, on fakes."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.backends.skyrl_train import placement
from skyrl.backends.skyrl_train.inference_servers import setup
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ConfigError
from skyrl.train.entrypoints import main_generate
from skyrl.train.entrypoints.main_generate import EvalOnlyEntrypoint
from skyrl.train.validate import validate_generator_cfg
from tests.fakes.environments import EnvScript, registered
from tests.fakes.trainer import TOKENIZER, RecordingTracker, make_cfg, make_engine, write_prompts


class FakeSetup:
    def shutdown(self) -> None:
        pass


class FakeClient:
    slept = False

    async def sleep(self) -> None:
        self.slept = True


def test_engines_that_share_no_gpu_with_a_trainer_keep_their_weights(tiny_model, tmp_path, monkeypatch):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": [{"role": "user", "content": "1"}]}\n')
    cfg = SkyRLTrainConfig()
    cfg.trainer.policy.model.path = str(tiny_model)
    cfg.data.val_data = [str(data)]
    assert cfg.trainer.placement.colocate_all
    client, asked = FakeClient(), []

    def build(cfg: Any, tokenizer: Any, group: Any) -> tuple[FakeClient, FakeSetup]:
        asked.append(group)
        return client, FakeSetup()

    monkeypatch.setattr(setup, "build_new_inference_client", build)
    monkeypatch.setattr(placement, "create_colocate_pg", lambda cfg, timeout: object())  # what a GPU host gives
    experiment = EvalOnlyEntrypoint(cfg.finalize())
    assert experiment.get_inference_client() is client
    assert asked == [None]
    assert not client.slept


def test_an_evaluation_needs_evaluation_data(tiny_model):
    cfg = SkyRLTrainConfig()
    cfg.trainer.policy.model.path = str(tiny_model)
    cfg.data.val_data = []
    with pytest.raises(ConfigError, match=r"data\.val_data is empty"):
        EvalOnlyEntrypoint(cfg.finalize())


class FakeEval(EvalOnlyEntrypoint):
    """Only engines and tracker are fakes."""

    def get_tokenizer(self, padding_side="left"):
        return TOKENIZER

    def get_tracker(self):
        return RecordingTracker()

    def get_inference_client(self):
        self.client, self.torn_down = make_engine(), 0

        async def teardown():
            self.torn_down += 1

        self.client.teardown = teardown
        return self.client


def make_entrypoint(folder, cls=FakeEval, **changes):
    write_prompts(folder / "val.jsonl", 2)
    return cls(make_cfg(folder, **changes))


def run(entrypoint, **script):
    with registered(EnvScript(**script)):
        return entrypoint.run()


def test_the_score_is_logged_at_step_zero_and_returned(tmp_path):
    entrypoint = make_entrypoint(tmp_path)
    assert run(entrypoint, rewards=(0.5,)) == 0.5
    ((step, record),) = entrypoint.tracker.records
    assert step == 0
    assert (record["eval/digits/avg_score"], record["eval/all/avg_score"]) == (0.5, 0.5)
    assert (entrypoint.tracker.finished, entrypoint.torn_down) == (1, 1)
    assert len(entrypoint.client.calls) == 4
    assert entrypoint.train_dataset is None
    assert (tmp_path / "export" / "dumped_evals" / "eval_only" / "digits.jsonl").exists()


def test_a_failure_reaches_the_tracker_and_closes_the_client(tmp_path):
    class Fails(FakeEval):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            generator = super().get_generator(cfg, tokenizer, inference_engine_client)
            generator.generate = self.fail
            return generator

        async def fail(self, input_batch):
            raise RuntimeError("no rollouts")

    entrypoint = make_entrypoint(tmp_path, Fails)
    with pytest.raises(RuntimeError, match="no rollouts"):
        run(entrypoint)
    assert entrypoint.tracker.errors == [("no rollouts", 0)]
    assert (entrypoint.tracker.finished, entrypoint.torn_down) == (1, 1)


def test_the_command_checks_only_what_rollouts_need(monkeypatch):
    ran = []
    monkeypatch.setattr(
        "skyrl.train.entrypoints.launch.run_hydra",
        lambda entrypoint, validate, trains: ran.append((entrypoint, validate, trains)),
    )
    main_generate.main()
    assert ran == [(EvalOnlyEntrypoint, validate_generator_cfg, False)]
