"""From config to running servers and a client that reaches them."""

from __future__ import annotations

import argparse
import logging
import secrets
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl.backends.skyrl_train.cluster import cluster_device_type, is_single_node
from skyrl.backends.skyrl_train.inference_servers.common import (
    LOOPBACK,
    PORT_WINDOW,
    get_node_ip,
)
from skyrl.backends.skyrl_train.inference_servers.health import ServerHealth
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.backends.skyrl_train.inference_servers.router import VLLMRouter
from skyrl.backends.skyrl_train.inference_servers.server_group import (
    ServerGroup,
    placement_group_for,
    wait_for_start,
)
from skyrl.backends.skyrl_train.inference_servers.supervisor import ServerSupervisor
from skyrl.backends.skyrl_train.inference_servers.utils import (
    build_router_args,
    build_vllm_cli_args,
    resolve_policy_model_name,
    resolve_server_mode,
    server_environment,
)
from skyrl.backends.skyrl_train.placement import ResolvedPlacementGroup
from skyrl.config.inference_engine import InferenceEngineConfig
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ConfigError

logger = logging.getLogger(__name__)

START_PORT = 8000
KEY = "generator.inference_engine"


@dataclass
class InferenceServerSetup:
    """What runs, and how to reach and stop it. External servers are never stopped."""

    proxy_url: str = ""
    """Data plane."""
    server_urls: list[str] = field(default_factory=list)
    """Control plane, engine-major."""
    router: VLLMRouter | None = None
    server_groups: list[ServerGroup] = field(default_factory=list)
    """One per engine."""
    health: ServerHealth | None = None
    """Deaths of servers started here; None with external servers."""
    access_token: str | None = None
    """What the servers ask for, when other hosts can reach them."""
    placement_group: Any = None
    """Placement group made here for all engines."""
    supervisor: ServerSupervisor | None = None

    def shutdown(self) -> None:
        """Stop router and servers and give their GPUs back, each also when another fails; again does nothing."""
        supervisor, self.supervisor = self.supervisor, None
        own_group, self.placement_group = self.placement_group, None
        with ExitStack() as steps:  # runs the last one first
            if own_group is not None:
                steps.callback(_give_back, own_group)
            for group in reversed(self.server_groups):
                steps.callback(group.shutdown)
            if self.router is not None:
                steps.callback(self.router.shutdown)
            if supervisor is not None:
                steps.callback(supervisor.stop)


def _give_back(placement_group: Any) -> None:
    import ray

    if ray.is_initialized():
        ray.util.remove_placement_group(placement_group)


def create_inference_servers(
    ie_cfg: InferenceEngineConfig,
    cli_args: argparse.Namespace,
    log_path: str | Path | None,
    placement_group: ResolvedPlacementGroup | None = None,
) -> InferenceServerSetup:
    """Start what the config asks for, and wait until it is healthy.

    | external_proxy_url | external_server_urls | result                                           |
    |--------------------|----------------------|--------------------------------------------------|
    | set                | set                  | both as given, nothing starts                    |
    | set                | unset                | the proxy also answers control calls             |
    | unset              | set                  | a router starts (for one server: none is needed) |
    | unset              | unset                | servers start, and a router for more than one    |

    Args:
        ie_cfg: ``generator.inference_engine``.
        cli_args: From ``build_vllm_cli_args``; unused with external servers.
        log_path: Folder of the router's log.
        placement_group: GPUs that the trainer shares with the engines.

    Raises:
        ValueError: External URLs with shared GPUs, or nothing external and ``run_engines_locally=false``.
        InferenceError, DeadlineError, ResourceError: A server or the router did not start; nothing is left running.
    """
    proxy, servers = ie_cfg.external_proxy_url, list(ie_cfg.external_server_urls or [])
    if (proxy or servers) and placement_group is not None:
        raise ConfigError(f"{KEY}.external_proxy_url and external_server_urls exclude trainer.placement.colocate_all")
    if proxy:
        return InferenceServerSetup(proxy_url=proxy, server_urls=servers or [proxy])
    setup = InferenceServerSetup()
    try:
        if servers:
            setup.server_urls = servers
        elif not ie_cfg.run_engines_locally:
            raise ConfigError(f"{KEY}.run_engines_locally=false needs external_proxy_url or external_server_urls")
        else:
            _start_servers(setup, ie_cfg, cli_args, placement_group)
        _start_router(setup, ie_cfg, log_path)
    except BaseException:
        setup.shutdown()
        raise
    return setup


def build_new_inference_client(
    cfg: SkyRLTrainConfig, tokenizer: Any, placement_group: ResolvedPlacementGroup | None = None
) -> tuple[RemoteInferenceClient, InferenceServerSetup]:
    """Servers by ``create_inference_servers``, and a client for them; the caller shuts the setup down.

    Blocks until the servers are healthy; run it in a thread to start trainers meanwhile. When it raises, nothing is
    left running.
    """
    ie_cfg = cfg.generator.inference_engine
    setup = create_inference_servers(ie_cfg, build_vllm_cli_args(cfg), cfg.trainer.log_path, placement_group)
    try:
        client = RemoteInferenceClient(
            proxy_url=setup.proxy_url,
            server_urls=setup.server_urls,
            data_parallel_size=_servers_per_engine(ie_cfg, len(setup.server_urls)),
            model_name=resolve_policy_model_name(cfg),
            tokenizer=tokenizer,
            access_token=setup.access_token,
            control_timeout_s=ie_cfg.control_timeout_s,
            trajectory_timeout_s=cfg.generator.trajectory_timeout_s,
            health=setup.health,
        )
    except BaseException:
        setup.shutdown()
        raise
    return client, setup


def _servers_per_engine(ie_cfg: InferenceEngineConfig, num_servers: int) -> int:
    """A lone external proxy stands for all ranks of its engines."""
    external = bool(ie_cfg.external_proxy_url) and not ie_cfg.external_server_urls
    return 1 if external and num_servers == 1 else ie_cfg.data_parallel_size


def _start_servers(
    setup: InferenceServerSetup,
    ie_cfg: InferenceEngineConfig,
    cli_args: argparse.Namespace,
    shared: ResolvedPlacementGroup | None,
) -> None:
    device_type = cluster_device_type()
    mode = resolve_server_mode(ie_cfg, device_type)
    setup.access_token = None if is_single_node() else secrets.token_urlsafe(32)
    environment = server_environment(
        cli_args, device_type, cpu_threads=ie_cfg.cpu_threads, access_token=setup.access_token
    )
    per_engine = ie_cfg.data_parallel_size
    gpus_per_engine = per_engine * ie_cfg.tensor_parallel_size * ie_cfg.pipeline_parallel_size
    bundles = shared
    if bundles is None and device_type != "cpu":
        setup.placement_group = placement_group_for(ie_cfg.num_engines * gpus_per_engine)
        bundles = ResolvedPlacementGroup(setup.placement_group)
    setup.server_groups = [
        ServerGroup(
            cli_args,
            num_servers=per_engine,
            start_port=START_PORT + engine * per_engine * PORT_WINDOW,
            placement_group=bundles,
            placement_group_bundle_offset=engine * gpus_per_engine,
            enable_dp=per_engine > 1,
            use_expandable_segments=ie_cfg.use_expandable_segments,
            env_vars_for_actors=environment,
            device_type=device_type,
            mode=mode,
            colocated_training=shared is not None,
        )
        for engine in range(ie_cfg.num_engines)
    ]
    infos = wait_for_start([ref for group in setup.server_groups for ref in group.start(blocking=False)])
    setup.server_urls = [info.url for info in infos]
    setup.health = ServerHealth()
    watches = {url: ref for group in setup.server_groups for url, ref in group.get_pool().watch().items()}
    setup.supervisor = ServerSupervisor(watches, setup.health)
    setup.supervisor.start()
    logger.info("%d inference server(s) ready (%s mode): %s", len(infos), mode, ", ".join(setup.server_urls))


def _start_router(setup: InferenceServerSetup, ie_cfg: InferenceEngineConfig, log_path: str | Path | None) -> None:
    if len(setup.server_urls) == 1 and not ie_cfg.always_use_router:
        setup.proxy_url = setup.server_urls[0]
        return
    host = get_node_ip() if setup.server_groups else LOOPBACK
    setup.router = VLLMRouter(build_router_args(ie_cfg, setup.server_urls, host=host), log_path)
    setup.proxy_url = setup.router.start()
