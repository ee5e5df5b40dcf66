"""Groups of server actors: create them on the right GPUs, start them together, stop them for certain."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl import env_vars
from skyrl.backends.skyrl_train.inference_servers.common import PORT_WINDOW, ServerInfo
from skyrl.backends.skyrl_train.inference_servers.health import START_TIMEOUT_KEY
from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import STOP_TIMEOUT_S, ServerLaunch, VLLMServerActor
from skyrl.backends.skyrl_train.placement import (
    CPUS_PER_CPU_WORKER,
    ResolvedPlacementGroup,
    get_ray_pg_ready_with_timeout,
)
from skyrl.errors import DeadlineError, InferenceError, SkyRLError

__all__ = ["ServerActorPool", "ServerGroup", "ServerInfo"]

logger = logging.getLogger(__name__)

START_MARGIN_S = 60.0
"""What Ray may need for the processes, on top of the servers' own start."""
FREE_RESOURCES_HINT = "has the cluster a free CPU or GPU for the server?"


class ServerActorPool:
    """Server actors that live and die together."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = list(actors)
        self._infos: list[ServerInfo] | None = None

    def start(self, blocking: bool = True) -> list[Any]:
        """Start all servers at once.

        Returns:
            Their addresses; without ``blocking`` the references of the actors' ``start`` calls.

        Raises:
            InferenceError: A server did not start; the others are stopped.
            DeadlineError: One took too long; all are stopped.
        """
        refs = [actor.start.remote() for actor in self._actors]
        if not blocking:
            return refs
        try:
            self._infos = wait_for_start(refs)
        except BaseException:
            self.shutdown()
            raise
        return self._infos

    @property
    def server_infos(self) -> list[ServerInfo]:
        """Addresses in the order of the actors; known before the servers are healthy."""
        if self._infos is None:
            self._infos = ray.get(
                [actor.get_server_info.remote() for actor in self._actors],
                timeout=env_vars.SKYRL_WAIT_UNTIL_INFERENCE_SERVER_HEALTHY_TIMEOUT_S,
            )
        return self._infos

    def get_server_urls(self) -> list[str]:
        """Base URLs in the order of the actors."""
        return [info.url for info in self.server_infos]

    def get_actors(self) -> list[Any]:
        """Ray handles."""
        return list(self._actors)

    def watch(self) -> dict[str, Any]:
        """For each URL a reference that is done when that server ends: with an error when it died."""
        return dict(zip(self.get_server_urls(), [actor.watch.remote() for actor in self._actors], strict=True))

    def shutdown(self) -> None:
        """Stop the servers, then kill the actors; again does nothing."""
        actors, self._actors = self._actors, []
        if not actors or not ray.is_initialized():
            return
        stops = [actor.shutdown.remote() for actor in actors]
        ray.wait(stops, num_returns=len(stops), timeout=STOP_TIMEOUT_S)
        for actor in actors:
            ray.kill(actor)


def wait_for_start(refs: Sequence[Any]) -> list[ServerInfo]:
    """Results of the actors' ``start`` calls in order; raises the first failure as soon as it happens."""
    limit = env_vars.SKYRL_WAIT_UNTIL_INFERENCE_SERVER_HEALTHY_TIMEOUT_S
    deadline = time.monotonic() + limit + START_MARGIN_S
    pending = list(refs)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            awaited = f"{len(pending)} inference server(s)"
            raise DeadlineError("the controller", awaited, limit, START_TIMEOUT_KEY, FREE_RESOURCES_HINT)
        _result(done[0])
    return [_result(ref) for ref in refs]


def _result(ref: Any) -> ServerInfo:
    try:
        info: ServerInfo = ray.get(ref)
        return info
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SkyRLError):
            raise cause from None
        raise InferenceError(f"an inference server failed to start: {cause}") from error
    except ray.exceptions.RayActorError as error:
        text = str(error).strip()
        raise InferenceError(f"the process of an inference server ended while it started: {text}") from error


class ServerGroup:
    """Servers with the same arguments; with ``enable_dp`` together one data-parallel engine.

    Args:
        cli_args: From ``utils.build_vllm_cli_args``.
        num_servers: How many.
        start_port: First port; server i has the block of 100 ports from ``start_port + 100 * i``.
        placement_group: One-GPU bundles for the workers; None makes a group of its own, or uses none without GPUs.
        placement_group_bundle_offset: First of the reordered bundles that this group takes.
        enable_dp: The servers are the ranks of one engine.
        server_actor_cls: Another class with ``VLLMServerActor``'s methods.
        use_expandable_segments: Expandable segments in the engines' CUDA allocator.
        env_vars_for_actors: Environment of the actors' processes (``utils.server_environment``).
        device_type: ``cpu`` or ``cuda``.
        launch_options: Further fields of ``ServerLaunch`` (``mode``, ``colocated_training``).
    """

    def __init__(  # noqa: PLR0913 - upstream's signature
        self,
        cli_args: argparse.Namespace,
        num_servers: int,
        start_port: int = 8000,
        placement_group: ResolvedPlacementGroup | None = None,
        placement_group_bundle_offset: int = 0,
        enable_dp: bool = False,
        server_actor_cls: Any | None = None,
        use_expandable_segments: bool = False,
        *,
        env_vars_for_actors: Mapping[str, str] | None = None,
        device_type: str = "cuda",
        **launch_options: Any,
    ) -> None:
        self._cli_args, self._num_servers, self._start_port = cli_args, num_servers, start_port
        self._bundle_offset, self._enable_dp = placement_group_bundle_offset, enable_dp
        self._actor_cls: Any = server_actor_cls or VLLMServerActor
        self._launch_options = launch_options
        self._env = dict(env_vars_for_actors or {})
        if use_expandable_segments:
            self._env |= expandable_segments_environment(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
        self._gpus_per_server = 0
        if device_type != "cpu":
            self._gpus_per_server = self._actor_cls.compute_num_gpus_per_server(cli_args)
        self._own_pg: PlacementGroup | None = None
        self._pg = placement_group
        if self._pg is None and self._gpus_per_server:
            self._own_pg = placement_group_for(num_servers * self._gpus_per_server)
            self._pg = ResolvedPlacementGroup(self._own_pg)
        self._pool: ServerActorPool | None = None

    def start(self, blocking: bool = True) -> list[Any]:
        """Create and start the servers; see ``ServerActorPool.start``."""
        return self.get_pool().start(blocking)

    @property
    def server_infos(self) -> list[ServerInfo]:
        """Addresses of the servers."""
        return self.get_pool().server_infos

    def get_server_urls(self) -> list[str]:
        """Base URLs of the servers."""
        return self.get_pool().get_server_urls()

    def get_actors(self) -> list[Any]:
        """Ray handles of the servers."""
        return self.get_pool().get_actors()

    def get_pool(self) -> ServerActorPool:
        """The actors; created at the first call."""
        if self._pool is None:
            self._pool = ServerActorPool(self._create_actors())
        return self._pool

    def shutdown(self) -> None:
        """Stop everything that this group created; again does nothing."""
        try:
            if self._pool is not None:
                self._pool.shutdown()
        finally:
            own_pg, self._own_pg = self._own_pg, None
            if own_pg is not None and ray.is_initialized():
                with contextlib.suppress(ray.exceptions.RayError):
                    remove_placement_group(own_pg)

    def _create_actors(self) -> list[Any]:
        actors = [self._create_actor(0, {})]
        try:
            shared = self._data_parallel_fields(actors[0])
            for index in range(1, self._num_servers):
                actors.append(self._create_actor(index, shared))
        except BaseException:
            ServerActorPool(actors).shutdown()
            raise
        return actors

    def _data_parallel_fields(self, first: Any) -> dict[str, Any]:
        """What the other ranks must know of the ``first``; empty without data parallelism."""
        if not self._enable_dp or self._num_servers <= 1:
            return {}
        limit = env_vars.SKYRL_WAIT_UNTIL_INFERENCE_SERVER_HEALTHY_TIMEOUT_S
        try:
            address, rpc_port = ray.get(first.get_dp_info.remote(), timeout=limit)
        except ray.exceptions.GetTimeoutError as error:
            awaited = "the address of the first data-parallel server"
            raise DeadlineError("the controller", awaited, limit, START_TIMEOUT_KEY, FREE_RESOURCES_HINT) from error
        return {"dp_master_address": address, "dp_rpc_port": rpc_port}

    def _create_actor(self, index: int, shared: Mapping[str, Any]) -> Any:
        fields = dict(self._launch_options) | dict(shared)
        fields |= {
            "server_idx": index,
            "start_port": self._start_port + PORT_WINDOW * index,
            "dp_size": self._num_servers if self._enable_dp else 1,
        }
        options: dict[str, Any] = {
            "num_cpus": CPUS_PER_CPU_WORKER,
            "num_gpus": 0,
            "runtime_env": {"env_vars": self._env},
        }
        if self._pg is not None and self._gpus_per_server:
            start = self._bundle_offset + index * self._gpus_per_server
            fields = self._actor_cls.prepare_server_kwargs(self._pg, start, self._gpus_per_server, **fields)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self._pg.pg,
                placement_group_capture_child_tasks=True,
                placement_group_bundle_index=fields["bundle_indices"][0],
            )
        return ray.remote(self._actor_cls).options(**options).remote(self._cli_args, ServerLaunch(**fields))


def placement_group_for(num_gpus: int) -> PlacementGroup:
    """Reserve ``num_gpus`` one-GPU bundles, close to each other.

    Raises:
        ResourceError: Ray could not reserve them in time.
    """
    group = placement_group([{"CPU": 1, "GPU": 1}] * num_gpus, strategy="PACK")
    get_ray_pg_ready_with_timeout(group)
    return group


def expandable_segments_environment(current: str) -> dict[str, str]:
    """``PYTORCH_CUDA_ALLOC_CONF`` with expandable segments; a user's own choice of that option stays."""
    if "expandable_segments" in current:
        return {"PYTORCH_CUDA_ALLOC_CONF": current}
    return {"PYTORCH_CUDA_ALLOC_CONF": ",".join(filter(None, [current, "expandable_segments:True"]))}
