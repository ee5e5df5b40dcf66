"""One vLLM server per Ray actor, and the same server without Ray from the command line.

python -m skyrl.backends.skyrl_train.inference_servers.vllm_server_actor --model <path> [any flag of vLLM's server]
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyrl import env_vars
from skyrl.backends.skyrl_train.inference_servers.common import LOOPBACK, ServerInfo, find_and_reserve_port, get_node_ip
from skyrl.backends.skyrl_train.inference_servers.vllm_middleware import ACCESS_TOKEN_VARIABLE
from skyrl.backends.skyrl_train.placement import COLOCATED_SHARE
from skyrl.errors import ConfigError

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
TCP_STORE_OFFSET = 64
"""Within a server's block of 100 ports, where its executor looks for a rendezvous port (32 candidates)."""
VLLM_STORE_PROBE_OFFSET = 100
"""vLLM adds this to ``VLLM_DP_MASTER_PORT`` before it probes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLaunch:
    """Where and how one server of a group runs."""

    server_idx: int = 0
    """Position in the group; with data parallelism the rank."""
    start_port: int = 8000
    """First port of the server's block of 100."""
    mode: str = "process"
    """``embedded`` or ``process`` (``vllm_server.ServerMode``)."""
    bundle_indices: tuple[int, ...] = ()
    """Placement-group bundle of each worker; empty without GPUs."""
    gpu_ids: tuple[int, ...] = ()
    """Physical GPU of each worker; used by the mp executor."""
    colocated_training: bool = False
    """Whether a trainer uses the same GPUs."""
    dp_size: int = 1
    """Servers that form one data-parallel engine."""
    dp_master_address: str | None = None
    """Node of data-parallel rank 0; None on rank 0 itself."""
    dp_rpc_port: int | None = None
    """Its RPC port."""


class VLLMServerActor:
    """Runs a vLLM server in this process; ``ServerGroup`` makes a Ray actor of it.

    Args:
        cli_args: Overrides of vLLM's defaults (``utils.build_vllm_cli_args``).
        launch: Where and how.
    """

    def __init__(self, cli_args: argparse.Namespace, launch: ServerLaunch) -> None:
        from skyrl.backends.skyrl_train.cluster import redirect_actor_output_to_file
        from skyrl.utils.log import configure_logging

        redirect_actor_output_to_file()
        configure_logging()
        self._launch = launch
        ip = get_node_ip()
        port, self._socket = find_and_reserve_port(launch.start_port, ip)
        self._info = ServerInfo(ip, port)
        self._args = argparse.Namespace(**vars(cli_args))
        self._args.host, self._args.port = ip, port
        os.environ.update(worker_environment(self._args, launch))
        self._server: Any = None

    @staticmethod
    def compute_num_gpus_per_server(cli_args: argparse.Namespace) -> int:
        """GPUs of one server: tensor times pipeline parallelism."""
        return int(cli_args.tensor_parallel_size * cli_args.pipeline_parallel_size)

    @staticmethod
    def prepare_server_kwargs(
        pg: Any, start_bundle_idx: int, num_gpus_per_server: int, **kwargs: Any
    ) -> dict[str, Any]:
        """Bundles and GPUs of the server that begins at ``start_bundle_idx`` of the reordered bundles of ``pg``."""
        order = pg.reordered_bundle_indices[start_bundle_idx : start_bundle_idx + num_gpus_per_server]
        gpus = tuple(pg.bundle_gpu_ids[index] for index in order)
        return kwargs | {"bundle_indices": tuple(order), "gpu_ids": gpus}

    def get_server_info(self) -> ServerInfo:
        """Address of the server."""
        return self._info

    def get_dp_info(self) -> tuple[str, int]:
        """Address and RPC port that the other data-parallel ranks of this engine need."""
        return self._info.ip, self._info.port + env_vars.SKYRL_VLLM_DP_PORT_OFFSET

    async def start(self) -> ServerInfo:
        """Start and return when ``/health`` answers.

        Raises:
            ConfigError: An argument that vLLM does not have.
            InferenceError: The server ended; says why.
            DeadlineError: It took longer than ``SKYRL_WAIT_UNTIL_INFERENCE_SERVER_HEALTHY_TIMEOUT_S``.
        """
        await asyncio.to_thread(self._start)
        return self._info

    async def watch(self) -> None:
        """Return when the server was stopped; raise ``InferenceError`` when it died."""
        await asyncio.to_thread(self._server.wait)

    async def shutdown(self) -> None:
        """Stop the server; its port is free afterwards."""
        if self._server is not None:
            await asyncio.to_thread(self._server.stop, STOP_TIMEOUT_S)
        self._socket.close()

    def _start(self) -> None:
        from skyrl.backends.skyrl_train.inference_servers.vllm_server import VLLMServer, complete_server_args

        self._set_data_parallel_args()
        args = complete_server_args(self._args)
        self._server = VLLMServer(args, self._socket, self._launch.mode)  # type: ignore[arg-type]
        self._server.start()
        self._server.wait_until_healthy(env_vars.SKYRL_WAIT_UNTIL_INFERENCE_SERVER_HEALTHY_TIMEOUT_S)

    def _set_data_parallel_args(self) -> None:
        launch = self._launch
        if launch.dp_size <= 1:
            return
        own_address, own_port = self.get_dp_info()
        self._args.data_parallel_size = launch.dp_size
        self._args.data_parallel_rank = launch.server_idx
        self._args.data_parallel_address = launch.dp_master_address or own_address
        self._args.data_parallel_rpc_port = launch.dp_rpc_port or own_port


def worker_environment(cli_args: argparse.Namespace, launch: ServerLaunch) -> dict[str, str]:
    """Environment variables that tell vLLM's executor which GPUs are its own; empty without GPUs.

    Raises:
        ValueError: The number of bundles is not that of the workers.
    """
    if not launch.bundle_indices:
        return {}
    workers = VLLMServerActor.compute_num_gpus_per_server(cli_args)
    if len(launch.bundle_indices) != workers:
        raise ValueError(f"{len(launch.bundle_indices)} bundles for {workers} workers of server {launch.server_idx}")
    env = {}
    if launch.dp_size == 1:
        env["VLLM_DP_MASTER_PORT"] = str(launch.start_port + TCP_STORE_OFFSET - VLLM_STORE_PROBE_OFFSET)
    if cli_args.distributed_executor_backend == "ray":
        env["VLLM_RAY_PER_WORKER_GPUS"] = str(COLOCATED_SHARE if launch.colocated_training else 1)
        env["VLLM_RAY_BUNDLE_INDICES"] = ",".join(map(str, launch.bundle_indices))
    else:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, launch.gpu_ids))
    return env


def require_private(host: str, access_token: str | None) -> None:
    """Let a server without an access token listen on the loopback only: its control routes replace the weights.

    Raises:
        ConfigError: ``host`` can be reached from elsewhere and there is no token.
    """
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and not access_token:
        raise ConfigError(
            f"--host={host} lets every host that reaches this one pause the engine and replace its weights; set "
            f"{ACCESS_TOKEN_VARIABLE} to a secret that callers send as bearer token, or leave --host={LOOPBACK}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; 1 when the server died."""
    from skyrl.backends.skyrl_train.inference_servers.utils import MIDDLEWARE
    from skyrl.utils.log import configure_logging

    configure_logging()
    os.environ.setdefault("VLLM_SERVER_DEV_MODE", "1")

    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from skyrl.backends.skyrl_train.inference_servers.vllm_server import VLLMServer

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm_server_actor", description=__doc__))
    args = parser.parse_args(argv)
    args.host = args.host or LOOPBACK
    try:
        require_private(args.host, os.environ.get(ACCESS_TOKEN_VARIABLE))
    except ConfigError as error:
        parser.error(str(error))
    if MIDDLEWARE not in args.middleware:
        args.middleware.append(MIDDLEWARE)
    validate_parsed_serve_args(args)
    sock = socket.socket(socket.AF_INET6 if ":" in args.host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((args.host, args.port))
    server = VLLMServer(args, sock, "process")
    stop_asked = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: stop_asked.set())
    server.start()
    while not stop_asked.wait(0.5):
        if server.wait(0.0):
            return 0
    return 0 if server.stop(STOP_TIMEOUT_S) else 1


if __name__ == "__main__":
    sys.exit(main())
