"""One real vLLM CPU server for the whole test session: a tiny fp32 Qwen3, priority scheduling, started by the product.

A process of its own holds it, with its own Ray cluster, so tests may start and stop Ray as they like. Ask for the
fixture ``vllm_server``; push weights before you rely on them, and leave the server resumed, with no request in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MAX_NUM_SEQS = 64
MAX_BATCHED_TOKENS = 1024


@dataclass(frozen=True)
class SharedServer:
    """The running server."""

    url: str
    model_dir: Path
    start_s: float
    """Seconds from asking for the server to healthy, Ray excluded."""

    def make_client(self, **options: Any) -> Any:
        """A new ``RemoteInferenceClient``; close it (``async with``) in the loop that used it."""
        from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

        options = {"model_name": str(self.model_dir)} | options
        return RemoteInferenceClient(proxy_url=self.url, server_urls=[self.url], data_parallel_size=1, **options)


async def push_start_weights(server: SharedServer) -> None:
    """Give the shared server the weights of its model folder, whatever an earlier test left in it."""
    import torch
    from transformers import AutoModelForCausalLM

    from skyrl.backends.skyrl_train.weight_sync.session import WeightSyncSession
    from skyrl.config.inference_engine import InferenceEngineConfig
    from tests.fakes.weights import DictExtractor, SoloTrainer

    model = AutoModelForCausalLM.from_pretrained(server.model_dir, dtype=torch.float32)
    trainer = SoloTrainer(DictExtractor({name: tensor.detach() for name, tensor in model.named_parameters()}))
    cfg = InferenceEngineConfig(model_dtype="float32", weight_sync_timeout_s=30.0)
    async with server.make_client() as client:
        session = WeightSyncSession(client, trainer, cfg, seed=0, device_type="cpu", colocated=False)
        await session.push()
    trainer.teardown_weight_sync()


def server_config(model: Path, log_path: Path) -> Any:
    """A config whose engine is small enough for tests."""
    from skyrl.config.root import SkyRLTrainConfig

    cfg = SkyRLTrainConfig()
    cfg.trainer.policy.model.path = str(model)
    cfg.trainer.log_path = str(log_path)
    cfg.trainer.placement.colocate_all = False
    cfg.generator.deterministic = True
    engine = cfg.generator.inference_engine
    engine.model_dtype = "float32"
    engine.enforce_eager = True
    engine.cpu_kv_cache_gb = 0.25
    engine.max_num_seqs = MAX_NUM_SEQS
    engine.max_num_batched_tokens = MAX_BATCHED_TOKENS
    return cfg


@pytest.fixture(scope="session")
def vllm_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    """The shared server; see the module."""
    logs = tmp_path_factory.mktemp("vllm-server")
    with (logs / "output.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.vllm_server", str(tiny_model), str(logs)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        while line and not line.startswith(b"{"):
            line = process.stdout.readline()
        if not line:
            pytest.fail(f"the shared vLLM server did not start; see {logs}", pytrace=False)
        started = json.loads(line)
        yield SharedServer(url=started["url"], model_dir=tiny_model, start_s=started["start_s"])
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def hold_server(model: Path, logs: Path, tune: Callable[[Any], None] | None = None) -> None:
    """Start Ray and the server, print ``{"url", "start_s"}``, and stop both when standard input closes."""
    import time

    import ray

    from skyrl.backends.skyrl_train.inference_servers.setup import build_new_inference_client
    from skyrl.utils.log import configure_logging

    os.environ["SKYRL_LOG_FILE"] = str(logs / "infra.log")
    configure_logging()
    environment = {"PYTHONPATH": str(ROOT), "SKYRL_LOG_FILE": os.environ["SKYRL_LOG_FILE"]}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    cfg = server_config(model, logs)
    if tune is not None:
        tune(cfg)
    began = time.monotonic()
    _, setup = build_new_inference_client(cfg, tokenizer=None)
    try:
        sys.stdout.write(json.dumps({"url": setup.proxy_url, "start_s": time.monotonic() - began}) + "\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        setup.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    hold_server(Path(sys.argv[1]), Path(sys.argv[2]))
