import asyncio
import os
import subprocess
import sys

import pytest

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.backends.skyrl_train.inference_servers.router import VLLMRouter
from skyrl.backends.skyrl_train.inference_servers.utils import build_router_args
from skyrl.config.inference_engine import InferenceEngineConfig
from skyrl.errors import ConfigError, InferenceError
from tests.fakes.http_server import FakeVLLMServer
from tests.fakes.processes import eventually, is_gone


def router_for(*servers, log_path=None, **options):
    engine = InferenceEngineConfig(router_init_kwargs=options)
    return VLLMRouter(build_router_args(engine, [server.url for server in servers]), log_path)


@pytest.mark.parametrize("policy", ["consistent_hash", "sticky_least_loaded"])
async def test_a_session_stays_on_its_server_and_new_ones_spread(policy, tmp_path):
    async with FakeVLLMServer().running() as one, FakeVLLMServer().running() as two:
        router = router_for(one, two, log_path=tmp_path, policy=policy)
        url = await asyncio.to_thread(router.start)
        try:
            client = RemoteInferenceClient(proxy_url=url, server_urls=[one.url, two.url], data_parallel_size=1)
            async with client:
                for _ in range(2):
                    await client.generate(
                        {"prompt_token_ids": [[i] for i in range(1, 21)], "session_ids": list("abcdefghijklmnopqrst")}
                    )
                await client.finish_session("session-0")
        finally:
            await asyncio.to_thread(router.shutdown)
        sessions = [[seen.headers["X-Session-ID"] for seen in s.requests("/inference/v1/generate")] for s in (one, two)]
    assert not set(sessions[0]) & set(sessions[1])
    assert len(sessions[0]) + len(sessions[1]) == 40
    assert min(map(len, sessions)) >= (20 if policy == "sticky_least_loaded" else 4)
    assert list(tmp_path.glob("router-*.log"))


async def test_shutdown_frees_the_port_and_is_idempotent():
    async with FakeVLLMServer().running() as server:
        router = router_for(server)
        await asyncio.to_thread(router.start)
        process_id = router.process_id
        for _ in range(2):
            router.shutdown()
        assert router.process_id is None
        assert is_gone(process_id)


def test_a_child_that_survives_sigkill_is_reported_and_not_waited_for(monkeypatch, caplog):
    class Stuck:
        pid, stdin = 77, None
        asked: list[str] = []  # noqa: RUF012

        def terminate(self):
            self.asked.append("terminate")

        def kill(self):
            self.asked.append("kill")

        def wait(self, timeout):
            raise subprocess.TimeoutExpired("router", timeout)

    stuck = VLLMRouter({})
    stuck._process = Stuck()
    stuck.shutdown()
    assert Stuck.asked == ["terminate", "kill"]
    assert "process 77" in caplog.text


def test_shutdown_before_start_does_nothing():
    VLLMRouter({}).shutdown()


async def test_a_child_that_dies_is_reported_with_its_exit_code_and_log(tmp_path):
    router = VLLMRouter({"worker_urls": ["not a url"], "policy": "nonsense"}, tmp_path)
    with pytest.raises(InferenceError, match=r"exit code 1.*nonsense"):
        await asyncio.to_thread(router.start)


def test_an_unknown_argument_is_refused_with_near_names():
    with pytest.raises(ConfigError, match="queue_size"):
        VLLMRouter({"queue_sise": 1}).start()


async def test_the_router_dies_with_its_parent():
    async with FakeVLLMServer().running() as server:
        script = (
            "import sys, time\n"
            "from skyrl.backends.skyrl_train.inference_servers.router import VLLMRouter\n"
            f"router = VLLMRouter({{'worker_urls': [{server.url!r}]}})\n"
            "router.start(); print(router.process_id, flush=True); time.sleep(60)\n"
        )
        parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=os.environ)
        process_id = int(await asyncio.to_thread(parent.stdout.readline))
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert await asyncio.to_thread(eventually, lambda: is_gone(process_id))
