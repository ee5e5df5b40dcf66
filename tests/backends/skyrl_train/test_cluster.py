from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from skyrl.backends.skyrl_train import cluster
from skyrl.config.root import SkyRLTrainConfig


def test_workers_get_the_users_environment_but_not_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_LEVEL", "DEBUG")
    monkeypatch.setenv("SKYRL_ANYTHING", "1")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("SOME_OTHER", "1")
    env = cluster.prepare_runtime_environment(SkyRLTrainConfig())
    assert env["LOG_LEVEL"] == "DEBUG"
    assert env["SKYRL_ANYTHING"] == "1"
    assert env["NCCL_CUMEM_ENABLE"] == "0"
    assert not {"PYTHONDONTWRITEBYTECODE", "SOME_OTHER", "VLLM_ALLOW_INSECURE_SERIALIZATION"} & env.keys()


def test_megatron_gets_its_variables() -> None:
    cfg = SkyRLTrainConfig()
    cfg.trainer.strategy = "megatron"
    env = cluster.prepare_runtime_environment(cfg)
    assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert env["NVTE_FUSED_ATTN"] == "0"


def test_output_of_an_actor_goes_to_the_log_file(tmp_path: Path) -> None:
    code = (
        "import os; from skyrl.backends.skyrl_train.cluster import redirect_actor_output_to_file as redirect;"
        "redirect(); os.write(1, b'from C'); print('from python', flush=True)"
    )
    target = tmp_path / "logs" / "infra.log"
    env = {"SKYRL_LOG_FILE": str(target), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert target.read_text() == "from Cfrom python\n"


def test_an_address_in_the_environment_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert cluster._cluster_address() is None
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    assert cluster._cluster_address() == "10.0.0.1:6379"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert cluster._cluster_address() == "10.0.0.2:6379"
