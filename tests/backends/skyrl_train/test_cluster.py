from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from skyrl.backends.skyrl_train import cluster
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ResourceError


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


def test_the_nodes_address_is_the_loopback_only_where_there_is_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"Alive": True}, {"Alive": False}]
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(cluster.ray.util, "get_node_ip_address", lambda: "[fd00::7]")
    assert cluster.get_node_ip() == "127.0.0.1"
    nodes.append({"Alive": True})
    assert cluster.get_node_ip() == "fd00::7"


def test_resources_are_asked_for_by_what_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = SkyRLTrainConfig()
    cfg.trainer.placement.colocate_all = False
    cfg.trainer.placement.policy_num_gpus_per_node = 8
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [{"Alive": True, "Resources": {"GPU": 1.0}}])
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"GPU": 1.0})
    cluster.require_resources(cfg, trains=False)
    with pytest.raises(ResourceError, match="policy_num_gpus_per_node=8"):
        cluster.require_resources(cfg)
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 1.2})
    cluster.require_resources(cfg, trains=False)
    with pytest.raises(ResourceError, match="ask for 10 processes"):
        cluster.require_resources(cfg)  # policy 8, reference 1, engine 1
