"""How long a weight sync pauses generation, and how near its send phase is to the wire.

    python benchmarks/weight_sync.py --backend gloo [--model DIR] [--repeats 7]

Syncs SmolLM2-135M (fp32 masters in this process, bf16 on the wire) into a real vLLM server on this machine through the
library's own client and session. Then it broadcasts the same buckets between two processes with plain gloo and nothing
else. The last line printed is one JSON object; the exit code is 1 when the send phase reaches less than half of the
plain broadcast's GB/s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.backends.skyrl_train.weight_sync.base import WeightChunk, WeightMetadata
from skyrl.backends.skyrl_train.weight_sync.gloo import GLOO_BUCKET_BYTES
from skyrl.backends.skyrl_train.weight_sync.group import Rendezvous, build_gloo_group, join_store
from skyrl.backends.skyrl_train.weight_sync.packing import plan_buckets
from skyrl.backends.skyrl_train.weight_sync.session import WeightSyncSession
from skyrl.backends.skyrl_train.weight_sync.worker_mixin import WeightSyncWorkerMixin
from skyrl.config.inference_engine import InferenceEngineConfig
from skyrl.config.root import SkyRLTrainConfig
from skyrl.types.weights import FingerprintPlan

ROOT = Path(__file__).resolve().parent.parent
TARGET_SHARE = 0.5
START_TIMEOUT_S = 180.0
PHASES = ("freeze_s", "start_s", "send_s", "load_s", "finish_s", "proof_s", "reset_s", "resume_s")


class ModelExtractor:
    """The weights of a plain model in this process."""

    def __init__(self, model: torch.nn.Module, *, tied: bool) -> None:
        self._weights = {
            name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")
        }

    def get_weight_metadata(self, dtype: torch.dtype) -> WeightMetadata:
        """See `WeightExtractor.get_weight_metadata`."""
        return WeightMetadata(
            names=list(self._weights),
            dtype_names=[str(dtype).removeprefix("torch.")] * len(self._weights),
            shapes=[list(tensor.shape) for tensor in self._weights.values()],
        )

    def extract_weights(self, dtype: torch.dtype) -> Iterator[WeightChunk]:
        """See `WeightExtractor.extract_weights`."""
        for name, tensor in self._weights.items():
            yield WeightChunk([name], [str(dtype)], [list(tensor.shape)], [tensor])

    def extract_named(self, names: Sequence[str], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightExtractor.extract_named`."""
        for name in names:
            yield name, self._weights[name].to(dtype)


class Trainer(WeightSyncWorkerMixin):
    """One trainer process, and at once the group of them that the session sees."""

    rank, world_size, is_colocated = 0, 1, False

    def __init__(self, extractor: ModelExtractor) -> None:
        self.weight_extractor = extractor

    async def init(self, client: Any, ie_cfg: InferenceEngineConfig) -> WeightMetadata:
        """See `TrainerRanks.init`."""
        return await self.init_weight_sync_state(client, ie_cfg)

    async def send(self, client: Any, ie_cfg: InferenceEngineConfig) -> dict[str, float]:
        """See `TrainerRanks.send`."""
        return await self.broadcast_to_inference_engines(client, ie_cfg)

    async def fingerprint(self, plan: FingerprintPlan) -> dict[str, str]:
        """See `TrainerRanks.fingerprint`."""
        return self.weight_fingerprint(plan)


def engine_config(model: str, backend: str) -> SkyRLTrainConfig:
    """The whole config of one CPU engine that serves ``model``."""
    cfg = SkyRLTrainConfig()
    cfg.trainer.policy.model.path = model
    cfg.trainer.placement.colocate_all = False
    engine = cfg.generator.inference_engine
    engine.weight_sync_backend, engine.enforce_eager = backend, True
    engine.max_num_batched_tokens, engine.max_num_seqs = 1024, 64
    engine.engine_init_kwargs = {"max_model_len": 1024}
    return cfg


def serve(model: str, backend: str, port: int) -> None:
    """Run one server in this process until SIGTERM, as a server actor does."""
    from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args
    from skyrl.backends.skyrl_train.inference_servers.vllm_server import VLLMServer, complete_server_args

    overrides = build_vllm_cli_args(engine_config(model, backend), "cpu")
    overrides.host, overrides.port = "127.0.0.1", port
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    server = VLLMServer(complete_server_args(overrides), bound, "embedded")
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    server.start()
    while not asked.wait(0.2):
        server.wait(0.0)
    server.stop(10)


@contextlib.contextmanager
def running_server(model: str, backend: str) -> Iterator[str]:
    """A server in a process of its own; yields its URL."""
    from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args, server_environment

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | server_environment(build_vllm_cli_args(engine_config(model, backend), "cpu"), "cpu")
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, "--backend", backend, "--model", model, "--serve", str(port)]
    process = subprocess.Popen(command, env=env, stdout=sys.stderr)
    try:
        wait_until_healthy(process, port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_until_healthy(process: subprocess.Popen[bytes], port: int) -> None:
    """Return when the server answers; RuntimeError when it ended or took too long."""
    import http.client

    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}; its output is above")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.suppress(OSError):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the server was not healthy within {START_TIMEOUT_S:.0f} s")


async def measure_syncs(url: str, model_dir: str, backend: str, repeats: int) -> tuple[list[dict[str, float]], Any]:
    """Sync ``repeats`` times after one warm-up, with other weights each time; metrics and the metadata sent."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    trainer = Trainer(ModelExtractor(model, tied=bool(model.config.tie_word_embeddings)))
    ie_cfg = engine_config(model_dir, backend).generator.inference_engine
    async with RemoteInferenceClient(proxy_url=url, server_urls=[url], data_parallel_size=1) as client:
        session = WeightSyncSession(client, trainer, ie_cfg, seed=0, device_type="cpu", colocated=False)
        await session.init()
        results = []
        for _ in range(repeats + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.001)
            results.append(await session.push())
        trainer.teardown_weight_sync()
    return results[1:], trainer.weight_extractor.get_weight_metadata(torch.bfloat16)


def receive_plain(port: int, sizes: Sequence[int], passes: int) -> None:
    """The other process of the plain broadcast: receive every bucket, ``passes`` times."""
    group = build_gloo_group(join_store("127.0.0.1", port, 1, 2, 60), 1, 2, address="127.0.0.1", timeout_s=60)
    buffers = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    for _ in range(passes):
        for buffer in buffers:
            group.broadcast(buffer).wait()
    group.close()


def measure_plain_broadcast(sizes: Sequence[int], repeats: int) -> float:
    """GB/s of the same buckets, ready in memory on one side and received into memory that is there on the other."""
    meeting = Rendezvous("127.0.0.1", 2, 60)
    arguments = ["--plain", str(meeting.port), "--sizes", json.dumps(list(sizes)), "--repeats", str(repeats)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    peer = subprocess.Popen([sys.executable, __file__, *arguments], env=env)
    try:
        group = build_gloo_group(meeting.store, 0, 2, address="127.0.0.1", timeout_s=60)
        buffers = [torch.ones(size, dtype=torch.uint8) for size in sizes]
        seconds = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            for buffer in buffers:
                group.broadcast(buffer).wait()
            seconds.append(time.perf_counter() - began)
        group.close()
    finally:
        peer.wait(60)
    return sum(sizes) / 1e9 / statistics.median(seconds[1:])


def report(results: list[dict[str, float]], plain_gb_per_s: float, buckets: Sequence[int], backend: str) -> dict:
    """The benchmark's JSON object."""

    def median(name: str) -> float:
        return statistics.median(result[f"weight_sync/{name}"] for result in results)

    share = median("gb_per_s") / plain_gb_per_s
    return {
        "name": f"weight_sync/{backend}",
        "value": round(share, 3),
        "unit": "share of a plain broadcast's GB/s in the send phase",
        "device": f"{os.cpu_count()} x {platform.processor() or platform.machine()}",
        "targets": {"send_share_of_plain_broadcast": TARGET_SHARE},
        "holds": share >= TARGET_SHARE,
        "pause_s": round(median("pause_s"), 4),
        "phases_s": {name.removesuffix("_s"): round(median(name), 4) for name in PHASES},
        "gather_s": round(median("gather_s"), 4),
        "send_gb_per_s": round(median("gb_per_s"), 3),
        "plain_gb_per_s": round(plain_gb_per_s, 3),
        "bytes": int(median("bytes")),
        "bucket_bytes": list(buckets),
        "proof_tensors": int(median("proof_tensors")),
        "repeats": len(results),
    }


def parse_arguments() -> argparse.Namespace:
    """Command line; the last three options are for the processes that this script starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="gloo", choices=["gloo"])
    parser.add_argument("--model", default=None, help="checkpoint directory; default: SmolLM2-135M of the cpu extra")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--serve", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--plain", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=json.loads, default=[], help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Run; 1 when the target is missed."""
    args = parse_arguments()
    if args.plain is not None:
        receive_plain(args.plain, args.sizes, args.repeats + 1)
        return 0
    if args.serve is not None:
        serve(args.model, args.backend, args.serve)
        return 0
    sys.path.insert(0, str(ROOT))
    from examples.train.quickstart.prepare_model import prepare_model

    model = args.model or str(prepare_model())
    with running_server(model, args.backend) as url:
        results, metadata = asyncio.run(measure_syncs(url, model, args.backend, args.repeats))
    buckets = [layout.size_bytes for layout in plan_buckets(metadata, GLOO_BUCKET_BYTES)]
    outcome = report(results, measure_plain_broadcast(buckets, args.repeats), buckets, args.backend)
    print(json.dumps(outcome))
    return 0 if outcome["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
