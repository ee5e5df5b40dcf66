import argparse
from typing import Any

import pytest

from skyrl.backends.skyrl_train.inference_servers import setup as module
from skyrl.backends.skyrl_train.inference_servers.setup import (
    InferenceServerSetup,
    build_new_inference_client,
    create_inference_servers,
)
from skyrl.config.inference_engine import InferenceEngineConfig
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ConfigError, InferenceError

ARGS = argparse.Namespace(model="m", tensor_parallel_size=1, pipeline_parallel_size=1)


class RecordedRouter:
    """Stands for ``VLLMRouter``."""

    made: list["RecordedRouter"] = []  # noqa: RUF012 - reset by the fixture

    def __init__(self, args: dict[str, Any], log_path: str) -> None:
        self.args, self.log_path, self.stopped = args, log_path, 0
        self.made.append(self)

    def start(self) -> str:
        if self.args["worker_urls"][0] == "http://broken":
            raise InferenceError("no")
        return "http://router"

    def shutdown(self) -> None:
        self.stopped += 1


@pytest.fixture(autouse=True)
def routers(monkeypatch):
    RecordedRouter.made = []
    monkeypatch.setattr(module, "VLLMRouter", RecordedRouter)
    return RecordedRouter.made


@pytest.mark.parametrize(
    ("proxy", "servers", "expected"),
    [
        ("http://p", ["http://a", "http://b"], ("http://p", ["http://a", "http://b"], 0)),
        ("http://p", None, ("http://p", ["http://p"], 0)),
        (None, ["http://a", "http://b"], ("http://router", ["http://a", "http://b"], 1)),
        (None, ["http://a"], ("http://a", ["http://a"], 0)),
    ],
)
def test_external_urls_decide_what_starts(routers, proxy, servers, expected):
    engine = InferenceEngineConfig(external_proxy_url=proxy, external_server_urls=servers)
    made = create_inference_servers(engine, ARGS, "/logs")
    assert (made.proxy_url, made.server_urls, len(routers)) == expected
    made.shutdown()
    assert all(router.stopped for router in routers)


def test_a_single_server_gets_a_router_on_request(routers):
    engine = InferenceEngineConfig(external_server_urls=["http://a"], always_use_router=True)
    assert create_inference_servers(engine, ARGS, "/logs").proxy_url == "http://router"
    assert routers[0].log_path == "/logs"


def test_a_router_that_does_not_start_is_stopped(routers):
    engine = InferenceEngineConfig(external_server_urls=["http://broken", "http://b"])
    with pytest.raises(InferenceError):
        create_inference_servers(engine, ARGS, None)
    assert routers[0].stopped


@pytest.mark.parametrize(
    ("engine", "group", "text"),
    [
        (InferenceEngineConfig(run_engines_locally=False), None, "run_engines_locally"),
        (InferenceEngineConfig(external_proxy_url="http://p"), object(), "colocate_all"),
        (InferenceEngineConfig(external_server_urls=["http://p"]), object(), "colocate_all"),
    ],
)
def test_contradictions_are_refused(engine, group, text):
    with pytest.raises(ConfigError, match=text):
        create_inference_servers(engine, ARGS, None, group)


def test_the_client_of_external_servers_knows_name_and_deadline(monkeypatch):
    cfg = SkyRLTrainConfig()
    engine = cfg.generator.inference_engine
    engine.external_server_urls, engine.served_model_name = ["http://a/", "http://b"], "policy"
    engine.control_timeout_s, engine.data_parallel_size = 5.0, 2
    cfg.generator.trajectory_timeout_s = 7.0
    monkeypatch.setattr(module, "build_vllm_cli_args", lambda cfg: ARGS)
    client, made = build_new_inference_client(cfg, tokenizer="tok")
    assert (client.model_name, client.tokenizer) == ("policy", "tok")
    assert (client.control_timeout_s, client.trajectory_timeout_s) == (5.0, 7.0)
    assert (client.server_urls, client.data_parallel_size) == (["http://a", "http://b"], 2)
    assert made.health is None
    engine.external_server_urls, engine.external_proxy_url = None, "http://p"
    assert build_new_inference_client(cfg, tokenizer=None)[0].data_parallel_size == 1


class RecordedGroup:
    """Stands for ``ServerGroup``."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.stopped = fails, 0

    def shutdown(self) -> None:
        self.stopped += 1
        if self.fails:
            raise OSError("group")


def test_everything_is_stopped_although_something_fails_to_stop():
    class BrokenRouter(RecordedRouter):
        def shutdown(self) -> None:
            raise OSError("router")

    groups = [RecordedGroup(), RecordedGroup(fails=True), RecordedGroup()]
    made = InferenceServerSetup(router=BrokenRouter({}, ""), server_groups=groups)
    with pytest.raises(OSError, match="group"):
        made.shutdown()
    assert [group.stopped for group in groups] == [1, 1, 1]


def test_a_client_that_cannot_be_made_stops_the_servers(routers, monkeypatch):
    cfg = SkyRLTrainConfig()
    engine = cfg.generator.inference_engine
    engine.external_server_urls, engine.data_parallel_size = ["http://a", "http://b", "http://c"], 2
    monkeypatch.setattr(module, "build_vllm_cli_args", lambda cfg: ARGS)
    with pytest.raises(ValueError, match="data_parallel_size=2"):
        build_new_inference_client(cfg, tokenizer=None)
    assert routers[0].stopped
