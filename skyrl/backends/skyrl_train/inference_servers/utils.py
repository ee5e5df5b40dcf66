"""From config to the arguments of servers and router (upstream's import path)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.backends.skyrl_train.inference_servers.common import LOOPBACK
from skyrl.backends.skyrl_train.inference_servers.vllm_middleware import ACCESS_TOKEN_VARIABLE
from skyrl.backends.skyrl_train.weight_sync.strategy import get_transfer_strategy
from skyrl.config.inference_engine import InferenceEngineConfig
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ConfigError

WORKER_EXTENSION = "skyrl.backends.skyrl_train.inference_servers.vllm_worker_extension.SkyRLWorkerExtension"
MIDDLEWARE = "skyrl.backends.skyrl_train.inference_servers.vllm_middleware.SkyRLMiddleware"

ROUTER_MAX_CONCURRENT = 32768
"""Above it the router answers 408 at once; the client limits requests instead."""
ROUTER_REQUEST_TIMEOUT_S = 86400
"""The router's own limit; ``generator.trajectory_timeout_s`` ends requests earlier."""


def resolve_policy_model_name(cfg: SkyRLTrainConfig) -> str:
    """Name under which the engine serves the policy: ``served_model_name``, else the model's path."""
    return cfg.generator.inference_engine.served_model_name or str(cfg.trainer.policy.model.path)


def build_vllm_cli_args(cfg: SkyRLTrainConfig, device_type: str | None = None) -> argparse.Namespace:
    """What the config says about vLLM's API server; the server process adds vLLM's defaults and checks names.

    Imports no vLLM, so the controller stays small. ``engine_init_kwargs`` come last and win.

    Args:
        cfg: The whole config.
        device_type: ``cpu`` or ``cuda``; None asks the Ray cluster.
    """
    if device_type is None:
        from skyrl.backends.skyrl_train.cluster import cluster_device_type

        device_type = cluster_device_type()
    engine, placement = cfg.generator.inference_engine, cfg.trainer.placement
    strategy = get_transfer_strategy(engine.weight_sync_backend, placement.colocate_all, device_type)
    values: dict[str, Any] = {
        "model": cfg.trainer.policy.model.path,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "dtype": engine.model_dtype,
        "data_parallel_size": engine.data_parallel_size,
        "seed": cfg.trainer.seed,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "enable_chunked_prefill": engine.enable_chunked_prefill,
        "enforce_eager": engine.enforce_eager,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "enable_expert_parallel": engine.expert_parallel_size > 1,
        "max_num_seqs": engine.max_num_seqs,
        "weight_transfer_config": {"backend": strategy.get_vllm_transfer_engine()},
        "worker_extension_cls": WORKER_EXTENSION,
        "generation_config": "vllm",
        "served_model_name": [engine.served_model_name] if engine.served_model_name else None,
        "language_model_only": engine.language_model_only,
        "mm_processor_cache_gb": 0,
        "kv_cache_metrics": True,
        "trust_remote_code": True,
        # vLLM's default takes log-probs before the temperature: wrong for every temperature but 1.
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority" if cfg.generator.deterministic else "fcfs",
        "middleware": [MIDDLEWARE],
        "disable_uvicorn_access_log": True,
        "disable_fastapi_docs": True,
    }
    values |= _cpu_args(engine) if device_type == "cpu" else _gpu_args(cfg)
    if engine.speculative_config:
        values["speculative_config"] = dict(engine.speculative_config)
    return argparse.Namespace(**(values | dict(engine.engine_init_kwargs or {})))


def _cpu_args(engine: InferenceEngineConfig) -> dict[str, Any]:
    """The worker lives in the engine core: one process less, and no shared memory to clean up."""
    return {
        "distributed_executor_backend": "uni",
        "kv_cache_memory_bytes": int(engine.cpu_kv_cache_gb * 2**30),
    }


def _gpu_args(cfg: SkyRLTrainConfig) -> dict[str, Any]:
    engine = cfg.generator.inference_engine
    return {
        "distributed_executor_backend": engine.distributed_executor_backend,
        "enable_sleep_mode": cfg.trainer.placement.colocate_all or engine.offload_kv_for_weight_sync,
    }


def resolve_server_mode(engine: InferenceEngineConfig, device_type: str) -> str:
    """``embedded`` or ``process``; ``auto`` embeds CPU engines only.

    Raises:
        ConfigError: Another word, or an embedded engine on GPUs.
    """
    mode = engine.server_mode
    if mode == "auto":
        return "embedded" if device_type == "cpu" else "process"
    if mode not in {"embedded", "process"}:
        raise ConfigError(f"generator.inference_engine.server_mode={mode!r} is unknown; use auto, embedded or process")
    if mode == "embedded" and device_type != "cpu":
        raise ConfigError("generator.inference_engine.server_mode=embedded is for CPU engines; use auto or process")
    return mode


def server_environment(
    cli_args: argparse.Namespace, device_type: str, *, cpu_threads: int | None = None, access_token: str | None = None
) -> dict[str, str]:
    """Environment of a server's process; it must be there before torch is imported.

    Args:
        cli_args: From ``build_vllm_cli_args``.
        device_type: ``cpu`` or ``cuda``.
        cpu_threads: OpenMP threads of a CPU engine; None means every core of this host.
        access_token: Asked of every request when set.
    """
    env = {
        "PYTHONDONTWRITEBYTECODE": "",  # empty means unset: import from cached bytecode, 9 s faster
        "VLLM_SERVER_DEV_MODE": "1",  # pause, weight update, RPC
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if os.path.isdir(cli_args.model):
        env["HF_HUB_OFFLINE"] = "1"
    if device_type == "cpu":
        threads = cpu_threads or len(os.sched_getaffinity(0))
        env |= {
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # a spinning thread takes the core from the one it waits for: half the speed
            "TORCHDYNAMO_DISABLE": "1",  # compiling one sampling function took 10 s of the start
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else vLLM turns the uni executor of a CPU engine into mp
        }
    if access_token:
        env[ACCESS_TOKEN_VARIABLE] = access_token
    return env


def build_router_args(
    ie_cfg: InferenceEngineConfig,
    server_urls: Sequence[str] | None = None,
    prefill_urls: Sequence[str] | None = None,
    decode_urls: Sequence[str] | None = None,
    host: str = LOOPBACK,
) -> dict[str, Any]:
    """Keyword arguments of ``vllm_router.router_args.RouterArgs``; the router adds free ports. User's values win.

    Raises:
        ValueError: Neither servers nor prefill and decode servers.
    """
    args: dict[str, Any] = {
        "host": host,
        "policy": "consistent_hash",
        "max_concurrent_requests": ROUTER_MAX_CONCURRENT,
        "queue_size": ROUTER_MAX_CONCURRENT,
        "queue_timeout_secs": ROUTER_REQUEST_TIMEOUT_S,
        "request_timeout_secs": ROUTER_REQUEST_TIMEOUT_S,
        "worker_startup_check_interval": 1,
        "log_level": "error",
    }
    if prefill_urls and decode_urls:
        args |= {
            "vllm_pd_disaggregation": True,
            "prefill_urls": [(url, None) for url in prefill_urls],
            "decode_urls": list(decode_urls),
            "prefill_policy": "consistent_hash",
            "decode_policy": "consistent_hash",
        }
    elif server_urls:
        args["worker_urls"] = list(server_urls)
    else:
        raise ValueError("a router needs server_urls, or prefill_urls and decode_urls")
    return args | _plain(ie_cfg.router_init_kwargs)


def _plain(mapping: Mapping[str, Any] | None) -> dict[str, Any]:
    return dict(mapping or {})
