"""Servers that die, are killed or stopped: the caller hears of it in seconds, and nothing is left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from skyrl.backends.skyrl_train.inference_servers.common import find_and_reserve_port
from skyrl.errors import InferenceError
from tests.fakes.processes import eventually, is_gone, is_port_free
from tests.fakes.vllm_server import ROOT, server_config

pytestmark = pytest.mark.vllm

SECONDS = 10.0


@pytest.fixture(scope="module")
def two_servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    """Two stock engines (without our worker extension) behind a router, started by the product."""
    import ray

    from skyrl.backends.skyrl_train.inference_servers.setup import build_new_inference_client

    logs, others = tmp_path_factory.mktemp("two-servers"), server_processes()
    environment = {"PYTHONPATH": str(ROOT), "SKYRL_LOG_FILE": str(logs / "infra.log")}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    cfg = server_config(tiny_model, logs)
    cfg.generator.inference_engine.num_engines = 2
    cfg.generator.inference_engine.router_init_kwargs = {"policy": "sticky_least_loaded"}
    cfg.generator.inference_engine.engine_init_kwargs = {
        "worker_extension_cls": "", "weight_transfer_config": None, "max_num_batched_tokens": 256,
    }  # fmt: skip
    client, setup = build_new_inference_client(cfg, tokenizer=None)
    yield SimpleNamespace(client=client, setup=setup, processes=server_processes() - others)
    setup.shutdown()
    ray.shutdown()


def server_processes() -> set[int]:
    commands = {process.pid: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    return {pid for pid, words in commands.items() if "VLLMServerActor" in " ".join(words)}


async def generate(client, count: int, tokens: int, **params):
    prompts = [[5 + i] * 60 for i in range(count)]
    sampling = [{"max_tokens": tokens, "min_tokens": tokens} | params | {"seed": i} for i in range(count)]
    if not params.get("seed", True):
        for one in sampling:
            del one["seed"]
    return await client.generate({"prompt_token_ids": prompts, "sampling_params": sampling})


async def test_requests_reach_both_servers_through_the_router(two_servers):
    client = two_servers.client
    output = await client.generate(
        {
            "prompt_token_ids": [[7, 8]] * 4,
            "sampling_params": {"max_tokens": 3, "temperature": 0.0},
            "session_ids": ["a", "b", "a", "b"],
        }
    )
    assert output["response_ids"] == [output["response_ids"][0]] * 4
    assert await client.get_world_size() == (2, 1)
    await client.finish_session("a")
    await client.aclose()
    assert two_servers.setup.proxy_url not in two_servers.setup.server_urls


async def test_an_engine_that_dies_is_an_error_in_seconds_that_says_why(two_servers):
    """The stock engine dies of a seed in a chunked prompt; when it no longer does, ``vllm_sampling`` can shrink."""
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

    url = two_servers.setup.server_urls[0]
    async with RemoteInferenceClient(
        proxy_url=url,
        server_urls=[url],
        data_parallel_size=1,
        model_name=two_servers.client.model_name,
        health=two_servers.setup.health,
    ) as direct:
        began = time.monotonic()
        with pytest.raises(InferenceError):
            await generate(direct, 32, 4)
        assert await asyncio.to_thread(eventually, lambda: url in two_servers.setup.health._dead, SECONDS)
        assert time.monotonic() - began < SECONDS
        with pytest.raises(InferenceError, match="does not use offset"):
            await direct.resume()


async def test_a_server_killed_while_it_generates_is_an_error_in_seconds(two_servers):
    import ray

    from skyrl.backends.skyrl_train.inference_servers.health import ServerHealth
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.backends.skyrl_train.inference_servers.supervisor import ServerSupervisor

    pool = two_servers.setup.server_groups[1].get_pool()
    (url,) = pool.get_server_urls()
    health = ServerHealth()
    supervisor = ServerSupervisor(pool.watch(), health)
    supervisor.start()
    async with RemoteInferenceClient(
        proxy_url=url, server_urls=[url], data_parallel_size=1, model_name=two_servers.client.model_name, health=health
    ) as direct:
        task = asyncio.create_task(generate(direct, 2, 430, seed=False))
        await direct.wait_until_queued(2, timeout_s=10)
        ray.kill(pool.get_actors()[0])
        began = time.monotonic()
        with pytest.raises(InferenceError, match="its process ended"):
            await task
        assert time.monotonic() - began < SECONDS
    await asyncio.to_thread(supervisor.stop)


def test_shutdown_leaves_no_process_and_no_port(two_servers):
    import ray

    router = two_servers.setup.router.process_id
    assert len(two_servers.processes) == 2
    urls = [*two_servers.setup.server_urls, two_servers.setup.proxy_url]
    for _ in range(2):
        two_servers.setup.shutdown()
    assert eventually(lambda: all(is_gone(pid) for pid in [*two_servers.processes, router]))
    assert all(is_port_free(int(url.rsplit(":", 1)[1])) for url in urls)
    assert ray.is_initialized()


def test_the_command_line_server_stops_on_sigterm_with_its_engine(tiny_model, tmp_path):
    port, reserved = find_and_reserve_port(24000)
    reserved.close()
    flags = {
        "model": tiny_model, "dtype": "float32", "port": port, "max-num-seqs": 8,
        "kv-cache-memory-bytes": 2**27, "distributed-executor-backend": "uni", "max-num-batched-tokens": 512,
    }  # fmt: skip
    command = [sys.executable, "-m", "skyrl.backends.skyrl_train.inference_servers.vllm_server_actor"]
    command += [part for name, value in flags.items() for part in (f"--{name}", str(value))] + ["--enforce-eager"]
    environment = os.environ | {
        "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    shm_before = set(os.listdir("/dev/shm"))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        assert eventually(lambda: not is_port_free(port) or process.poll() is not None, 120), (
            tmp_path / "log"
        ).read_text()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/skyrl/v1/queue", timeout=10) as answer:
            assert answer.read() == b'{"unfinished": 0}'
        children = psutil.Process(process.pid).children(recursive=True)
        assert any("EngineCore" in child.name() or "spawn_main" in " ".join(child.cmdline()) for child in children)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert eventually(lambda: all(is_gone(child.pid) for child in children))
        assert is_port_free(port)
        assert set(os.listdir("/dev/shm")) <= shm_before
        assert "EngineDeadError" not in (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
