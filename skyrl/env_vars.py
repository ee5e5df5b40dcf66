"""Environment variables that the library reads, each parsed once, at import.

Everything else is configured by keys (`skyrl.config`).
"""

from __future__ import annotations

import os


def _int(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ValueError(f"environment variable {name}={text!r} must be an integer; unset it for {default}") from None


def _bool(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in {"1", "true", "yes"}


SKYRL_RAY_PG_TIMEOUT_IN_S = _int("SKYRL_RAY_PG_TIMEOUT_IN_S", 180)
"""Seconds to wait for a Ray placement group."""
SKYRL_WORKER_NCCL_TIMEOUT_IN_S = _int("SKYRL_WORKER_NCCL_TIMEOUT_IN_S", 600)
"""Seconds a torch process group waits for its members."""
SKYRL_WAIT_UNTIL_INFERENCE_SERVER_HEALTHY_TIMEOUT_S = _int("SKYRL_WAIT_UNTIL_INFERENCE_SERVER_HEALTHY_TIMEOUT_S", 600)
"""Seconds from the start of an inference server to its first healthy answer."""
SKYRL_VLLM_DP_PORT_OFFSET = _int("SKYRL_VLLM_DP_PORT_OFFSET", 500)
"""Distance of the engine's data-parallel RPC port from its HTTP port."""
SKYRL_HTTP_CONNECTION_LIMIT = _int("SKYRL_HTTP_CONNECTION_LIMIT", 50_000)
"""Open connections of one client, and the backlog of one server."""
SKYRL_GENERATE_CONCURRENCY_PER_ENGINE = _int("SKYRL_GENERATE_CONCURRENCY_PER_ENGINE", 512)
"""Requests in flight per inference server; 0 means no limit."""
SKYRL_LD_LIBRARY_PATH_EXPORT = _bool("SKYRL_LD_LIBRARY_PATH_EXPORT")
"""Forward LD_LIBRARY_PATH to every worker."""
SKYRL_PYTHONPATH_EXPORT = _bool("SKYRL_PYTHONPATH_EXPORT")
"""Forward PYTHONPATH to every worker."""
SKYRL_DUMP_INFRA_LOG_TO_STDOUT = _bool("SKYRL_DUMP_INFRA_LOG_TO_STDOUT")
"""Leave the output of workers and engines on the terminal instead of the log file."""
SKYRL_DISABLE_SPEC = _bool("SKYRL_DISABLE_SPEC")
"""Train draft heads but decode without speculation."""
SKYRL_WEIGHT_SYNC_HOST = os.environ.get("SKYRL_WEIGHT_SYNC_HOST", "")
"""Address at which engines reach the trainer for weight sync; empty means the node's own."""
