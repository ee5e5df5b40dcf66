"""Ray as a run starts it: quick, on loopback, knowing the user's functions, and gone afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from skyrl.backends.skyrl_train import cluster
from skyrl.errors import ResourceError
from tests.backends.skyrl_train.workers.conftest import make_cfg

pytestmark = pytest.mark.ray

SCRIPT = """
import json, os, sys, time

os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
from skyrl.algorithms.policy_losses import register_policy_loss
from skyrl.backends.skyrl_train.cluster import cluster_device_type, initialize_ray
from skyrl.config.root import SkyRLTrainConfig
import ray

@register_policy_loss("loss_of_a_script")
def loss_of_a_script(log_probs, old_log_probs, advantages, config, loss_mask=None):
    return log_probs.sum()

cfg = SkyRLTrainConfig()
cfg.trainer.log_path = sys.argv[1]
cfg.generator.inference_engine.run_engines_locally = False

@ray.remote(num_cpus=0.1)
def what_a_worker_knows():
    from skyrl.algorithms.policy_losses import PolicyLossRegistry
    return "loss_of_a_script" in PolicyLossRegistry, os.environ.get("PYTHONDONTWRITEBYTECODE"), sys.dont_write_bytecode

start = time.time()
initialize_ray(cfg)
seconds = time.time() - start
initialize_ray(cfg)  # a second call changes nothing
known, variable, flag = ray.get(what_a_worker_knows.remote())
address = ray.util.get_node_ip_address()
ray.shutdown()
print(json.dumps([known, variable, flag, address, seconds]))
"""


def test_a_script_starts_ray_and_its_functions_reach_workers(tmp_path: Path) -> None:
    import json

    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "logs")], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    known, variable, flag, address, seconds = json.loads(done.stdout.strip().splitlines()[-1])
    assert (known, variable, flag, address) == (True, None, False, "127.0.0.1")
    assert seconds < 60  # 3-4 s on an idle host
    assert list((tmp_path / "logs").glob("infra-*.log")) == []  # nothing was written yet


def test_too_many_processes_are_refused_before_anything_waits(ray_cluster: Path, tiny_model: Path) -> None:
    cfg = make_cfg(tiny_model, ray_cluster, ranks=1000)
    assert cluster.cluster_device_type() == "cpu"
    with pytest.raises(ResourceError, match="ask for 1001 processes"):
        cluster.initialize_ray(cfg)


def test_output_of_workers_is_in_the_infra_log(ray_cluster: Path, tiny_model: Path) -> None:
    from skyrl.backends.skyrl_train.workers.actor_group import PPORayActorGroup
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import RefWorker

    cfg = make_cfg(tiny_model, ray_cluster)
    group = PPORayActorGroup(cfg.trainer, 1, 1, RefWorker, role="ref")
    try:
        import os

        import ray

        ray.get(group.actor_infos[0].handle.__ray_call__.remote(lambda _: os.write(1, b"a line of a worker\n")))
        assert group.get_dp_size() == 1
        log = next(ray_cluster.glob("infra-*.log"))
        assert "a line of a worker" in log.read_text()
    finally:
        group.shutdown()
    assert group.get_dp_size() == 1  # the last value is remembered
