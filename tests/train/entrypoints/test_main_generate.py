from __future__ import annotations

from typing import Any

import pytest

from skyrl.backends.skyrl_train import placement
from skyrl.backends.skyrl_train.inference_servers import setup
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ConfigError
from skyrl.train.entrypoints.main_generate import EvalOnlyEntrypoint


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
