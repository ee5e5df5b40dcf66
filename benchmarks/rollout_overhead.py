"""What client and router cost: tokens/s through both over tokens/s of a bare HTTP loop on the same server.

    python benchmarks/rollout_overhead.py [--model DIR] [--requests 128] [--tokens 32] [--repeats 3]

One vLLM CPU server with SmolLM2-135M (bf16), started by the library, with a router although one server needs none.
Both ways send the same prompts with the same seeds, 64 in flight, in turns; the prefix cache is emptied before each.
The last line printed is one JSON object; the exit code is 1 when the ratio of the medians is below 0.95.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

if TYPE_CHECKING:
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.backends.skyrl_train.inference_servers.setup import InferenceServerSetup

ROOT = Path(__file__).resolve().parent.parent
IN_FLIGHT = 64
TARGET = 0.95
PROMPT_TOKENS = (24, 64)
CONTEXT_TOKENS = 512

Batch = tuple[list[list[int]], list[dict[str, Any]]]


def make_batch(requests: int, tokens: int) -> Batch:
    """Random prompts of 24 to 64 tokens and their sampling parameters; every response has ``tokens`` tokens."""
    draw = random.Random(0)
    prompts = [[draw.randrange(100, 40_000) for _ in range(draw.randint(*PROMPT_TOKENS))] for _ in range(requests)]
    shared = {"max_tokens": tokens, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, "output_kind": 2}
    return prompts, [shared | {"seed": i} for i in range(requests)]


def start(model: Path) -> tuple[RemoteInferenceClient, InferenceServerSetup]:
    """Ray, one server and a router."""
    import ray
    from transformers import AutoTokenizer

    from skyrl.backends.skyrl_train.inference_servers.setup import build_new_inference_client
    from skyrl.config.root import SkyRLTrainConfig

    cfg = SkyRLTrainConfig()
    cfg.trainer.policy.model.path = str(model)
    cfg.trainer.placement.colocate_all = False
    engine = cfg.generator.inference_engine
    engine.always_use_router, engine.enforce_eager = True, True
    engine.max_num_seqs, engine.max_num_batched_tokens = IN_FLIGHT, 1024
    engine.engine_init_kwargs = {"max_model_len": CONTEXT_TOKENS}
    ray.init(
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    return build_new_inference_client(cfg, AutoTokenizer.from_pretrained(model))


async def through_library(client: RemoteInferenceClient, batch: Batch) -> int:
    """Tokens that the client returned."""
    prompts, params = batch
    output = await client.generate({"prompt_token_ids": prompts, "sampling_params": params})
    return sum(map(len, output["response_ids"]))


async def bare_loop(url: str, model: str, batch: Batch) -> int:
    """Tokens of the same requests, sent straight to the server by as little code as possible."""
    slots = asyncio.Semaphore(IN_FLIGHT)
    headers = {"Content-Type": "application/json"}

    async def one(session: aiohttp.ClientSession, prompt: list[int], params: dict[str, Any]) -> int:
        body = orjson.dumps({"model": model, "token_ids": prompt, "sampling_params": params})
        async with slots, session.post(f"{url}/inference/v1/generate", data=body, headers=headers) as response:
            return len(orjson.loads(await response.read())["choices"][0]["token_ids"])

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        return sum(await asyncio.gather(*(one(session, *pair) for pair in zip(*batch, strict=True))))


async def tokens_per_s(client: RemoteInferenceClient, run: Callable[[], Awaitable[int]]) -> float:
    """Rate of one run on an empty prefix cache."""
    await client.reset_prefix_cache()
    began = time.perf_counter()
    return await run() / (time.perf_counter() - began)


async def measure(client: RemoteInferenceClient, url: str, batch: Batch, repeats: int) -> dict[str, list[float]]:
    """Rates of both ways in turns, after one unmeasured turn."""
    ways: dict[str, Callable[[], Awaitable[int]]] = {
        "library": lambda: through_library(client, batch),
        "bare": lambda: bare_loop(url, client.model_name, batch),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    async with client:
        for turn in range(repeats + 1):
            # Each way goes first in every other turn.
            for name in sorted(ways, reverse=bool(turn % 2)):
                rate = await tokens_per_s(client, ways[name])
                if turn:
                    rates[name].append(rate)
                    print(f"turn {turn} {name:8} {rate:7.1f} tokens/s", flush=True)
    return rates


def main() -> int:
    """Measure and print; 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint; default SmolLM2-135M-Instruct of the cpu extra")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each request")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    # All before ray and the library are imported.
    os.environ["SKYRL_GENERATE_CONCURRENCY_PER_ENGINE"] = str(IN_FLIGHT)
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if options.model is None:
        from examples.train.quickstart.prepare_model import prepare_model

        options.model = prepare_model()
    import ray

    began = time.perf_counter()
    client, setup = start(options.model)
    ready_s = time.perf_counter() - began
    try:
        batch = make_batch(options.requests, options.tokens)
        rates = asyncio.run(measure(client, setup.server_urls[0], batch, options.repeats))
    finally:
        setup.shutdown()
        ray.shutdown()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["library"] / medians["bare"]
    result = {
        "name": "rollout_overhead",
        "value": round(ratio, 4),
        "unit": "library tokens/s over bare tokens/s",
        "device": f"{os.cpu_count()} cores {platform.machine()}",
        "targets": {"value": TARGET},
        "holds": ratio >= TARGET,
        "tokens_per_s": {name: [round(rate, 1) for rate in values] for name, values in rates.items()},
        "ray_server_router_ready_s": round(ready_s, 1),
        "in_flight": IN_FLIGHT,
    }
    print(json.dumps(result))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
