import argparse
import os
import time

import pytest
import ray

from skyrl.backends.skyrl_train.inference_servers import server_group
from skyrl.backends.skyrl_train.inference_servers.common import ServerInfo
from skyrl.backends.skyrl_train.inference_servers.health import ServerHealth
from skyrl.backends.skyrl_train.inference_servers.server_group import ServerGroup, expandable_segments_environment
from skyrl.backends.skyrl_train.inference_servers.supervisor import ServerSupervisor
from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import (
    ServerLaunch,
    VLLMServerActor,
    require_private,
    worker_environment,
)
from skyrl.errors import ConfigError, InferenceError
from tests.fakes.processes import eventually, is_gone


@pytest.mark.parametrize(
    ("current", "result"),
    [
        ("", "expandable_segments:True"),
        ("max_split_size_mb:64", "max_split_size_mb:64,expandable_segments:True"),
        ("expandable_segments:False", "expandable_segments:False"),
    ],
)
def test_expandable_segments_are_appended_unless_the_user_chose(current, result):
    assert expandable_segments_environment(current) == {"PYTORCH_CUDA_ALLOC_CONF": result}


def gpu_args(backend: str, tensor: int = 2) -> argparse.Namespace:
    return argparse.Namespace(
        tensor_parallel_size=tensor, pipeline_parallel_size=1, distributed_executor_backend=backend
    )


def test_without_gpus_the_executor_needs_no_environment():
    assert worker_environment(gpu_args("uni"), ServerLaunch()) == {}


def test_ray_workers_are_bound_to_bundles_and_rendezvous_ports_are_disjoint():
    launch = ServerLaunch(bundle_indices=(3, 2), gpu_ids=(0, 1), start_port=8100, colocated_training=True)
    assert worker_environment(gpu_args("ray"), launch) == {
        "VLLM_DP_MASTER_PORT": "8064",  # vLLM probes from 8064 + 100 on: inside the server's block
        "VLLM_RAY_PER_WORKER_GPUS": "0.2",
        "VLLM_RAY_BUNDLE_INDICES": "3,2",
    }


def test_mp_workers_see_the_gpus_of_their_bundles():
    launch = ServerLaunch(bundle_indices=(3, 2), gpu_ids=(5, 4), dp_size=2)
    assert worker_environment(gpu_args("mp"), launch) == {"CUDA_VISIBLE_DEVICES": "5,4"}


def test_bundles_must_match_the_workers():
    with pytest.raises(ValueError, match="1 bundles for 2 workers"):
        worker_environment(gpu_args("ray"), ServerLaunch(bundle_indices=(1,)))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "somewhere"])
def test_a_server_that_others_reach_needs_a_token(host):
    with pytest.raises(ConfigError, match=r"SKYRL_SERVER_ACCESS_TOKEN.*127\.0\.0\.1"):
        require_private(host, None)
    require_private(host, "secret")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_the_loopback_needs_no_token(host):
    require_private(host, None)


def test_a_server_takes_its_share_of_the_reordered_bundles():
    class Group:
        reordered_bundle_indices = (4, 5, 0, 1)
        bundle_gpu_ids = (10, 11, 12, 13, 14, 15)

    assert VLLMServerActor.prepare_server_kwargs(Group(), 2, 2, mode="process") == {
        "bundle_indices": (0, 1),
        "gpu_ids": (10, 11),
        "mode": "process",
    }


class FakeServer:
    """An actor without an engine; ``cli_args.fate`` says how its start ends."""

    def __init__(self, cli_args, launch):
        self.fate, self.launch = cli_args.fate, launch

    @staticmethod
    def compute_num_gpus_per_server(cli_args):
        return 1

    def get_server_info(self):
        return ServerInfo("127.0.0.1", self.launch.start_port)

    def get_dp_info(self):
        return "10.0.0.1", 8500

    def describe(self):
        return os.getpid(), self.launch, os.environ.get("WORD")

    async def start(self):
        if self.fate == "config" and self.launch.server_idx == 1:
            raise ConfigError("no such flag")
        if self.fate == "die" and self.launch.server_idx == 1:
            os._exit(3)
        if self.fate != "ok" and self.launch.server_idx != 1:
            import asyncio

            await asyncio.sleep(60)
        return self.get_server_info()

    async def watch(self):
        import asyncio

        await asyncio.sleep(600)

    async def shutdown(self):
        pass


@pytest.fixture(scope="module")
def ray_cluster():
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    yield
    ray.shutdown()


class HalfMadeGroup(ServerGroup):
    """Fails at its second actor."""

    def _create_actor(self, index, shared):
        if index == 1:
            raise InferenceError("no room")
        self.first = super()._create_actor(index, shared)
        self.first_pid = ray.get(self.first.describe.remote())[0]
        return self.first


@pytest.mark.ray
def test_a_group_that_fails_half_way_stops_what_it_created(ray_cluster):
    group = HalfMadeGroup(argparse.Namespace(fate="ok"), 2, server_actor_cls=FakeServer, device_type="cpu")
    with pytest.raises(InferenceError, match="no room"):
        group.start()
    assert eventually(lambda: is_gone(group.first_pid))


def make_group(fate: str, **options) -> ServerGroup:
    return ServerGroup(
        argparse.Namespace(fate=fate), 2, start_port=9000, server_actor_cls=FakeServer, device_type="cpu", **options
    )


@pytest.mark.ray
def test_servers_get_their_place_their_ports_and_their_environment(ray_cluster):
    group = make_group("ok", enable_dp=True, env_vars_for_actors={"WORD": "yes"}, mode="embedded")
    assert group.start() == [ServerInfo("127.0.0.1", 9000), ServerInfo("127.0.0.1", 9100)]
    assert group.get_server_urls() == ["http://127.0.0.1:9000", "http://127.0.0.1:9100"]
    (pid, first, word), (_, second, _) = ray.get([actor.describe.remote() for actor in group.get_actors()])
    assert (first.dp_master_address, first.dp_size, first.mode, word) == (None, 2, "embedded", "yes")
    assert (second.dp_master_address, second.dp_rpc_port, second.server_idx) == ("10.0.0.1", 8500, 1)
    group.shutdown()
    group.shutdown()
    assert eventually(lambda: is_gone(pid))
    assert group.get_actors() == []


@pytest.mark.ray
@pytest.mark.parametrize(
    ("fate", "error", "text"), [("config", ConfigError, "no such flag"), ("die", InferenceError, "process .* ended")]
)
def test_a_server_that_fails_to_start_is_reported_before_the_others_are_ready(ray_cluster, fate, error, text):
    group = make_group(fate)
    began = time.monotonic()
    with pytest.raises(error, match=text):
        group.start()
    assert time.monotonic() - began < 20
    assert group.get_actors() == []


@pytest.mark.ray
def test_the_supervisor_notices_a_killed_actor_at_once(ray_cluster):
    group = make_group("ok")
    group.start()
    health = ServerHealth()
    supervisor = ServerSupervisor(group.get_pool().watch(), health, interval_s=60)
    supervisor.start()
    ray.kill(group.get_actors()[1])
    began = time.monotonic()
    assert eventually(lambda: health._dead != {}, 5)
    assert time.monotonic() - began < 3
    with pytest.raises(InferenceError, match="9100: its process ended"):
        health.raise_if_dead()
    supervisor.stop()
    group.shutdown()


@pytest.mark.ray
def test_the_supervisor_counts_unanswered_health_checks(ray_cluster):
    group = make_group("ok")  # nobody listens on its ports
    group.start()
    health = ServerHealth()
    supervisor = ServerSupervisor(group.get_pool().watch(), health, interval_s=0.1, max_misses=2)
    supervisor.start()
    assert eventually(lambda: len(health._dead) == 2, 10)
    with pytest.raises(InferenceError, match="2 health checks"):
        health.raise_if_dead()
    supervisor.stop()
    group.shutdown()


def test_waiting_without_servers_returns_nothing():
    assert server_group.wait_for_start([]) == []
