"""A role's actors: one process per rank, started together, called together."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl.algorithms.registries import export_user_functions
from skyrl.backends.skyrl_train import cluster
from skyrl.backends.skyrl_train.distributed.dispatch import ActorInfo, DispatchRegistry
from skyrl.backends.skyrl_train.placement import (
    COLOCATED_SHARE,
    CPUS_PER_CPU_WORKER,
    ResolvedPlacementGroup,
    get_ray_pg_ready_with_timeout,
)
from skyrl.backends.skyrl_train.workers.waiting import Call, wait_for, wait_for_async
from skyrl.config.trainer import TrainerConfig
from skyrl.errors import ConfigError, ResourceError

logger = logging.getLogger(__name__)

_KEEP_FREED_MEMORY = "20000000000"


class PPORayActorGroup:
    """Starts ``num_nodes * num_gpus_per_node`` actors of one class and joins them into a process group.

    Args:
        cfg: `trainer`.
        num_nodes: Nodes.
        num_gpus_per_node: Ranks on each node.
        ray_actor_type: Remote worker class, or the class itself.
        pg: Placement group to use; None makes one for several GPUs on a node, and needs none on a CPU.
        num_gpus_per_actor: GPU (and CPU) share of a rank.
        resources: Extra Ray resources of a rank.
        num_resources_per_node: Amount of each of those on a node.
        colocate_all: All roles and the engines share ``pg``.
        sequence_parallel_size: Ranks that share a sequence.
        record_memory: Record GPU allocations.
        role: Name in messages.

    Raises:
        ConfigError: ``colocate_all`` with GPUs but without a group of one bundle per rank.
        ResourceError: Ray cannot place the ranks in time.
        WorkerError: A rank died at its start.
    """

    def __init__(  # noqa: PLR0913 (upstream's signature)
        self,
        cfg: TrainerConfig,
        num_nodes: int,
        num_gpus_per_node: int,
        ray_actor_type: Any,
        pg: PlacementGroup | ResolvedPlacementGroup | None = None,
        num_gpus_per_actor: float = 1.0,
        resources: Mapping[str, float] | None = None,
        num_resources_per_node: int | None = None,
        colocate_all: bool = False,
        sequence_parallel_size: int = 1,
        record_memory: bool = False,
        *,
        role: str = "worker",
    ) -> None:
        self.cfg = cfg
        self.role = role
        self.world_size = num_nodes * num_gpus_per_node
        self._num_gpus_per_node = num_gpus_per_node
        self._sequence_parallel_size = sequence_parallel_size
        self._record_memory = record_memory
        self._resources = {name: amount / (num_resources_per_node or 1) for name, amount in (resources or {}).items()}
        self._actor_type = (
            ray_actor_type if isinstance(ray_actor_type, ray.actor.ActorClass) else ray.remote(ray_actor_type)
        )
        self._on_gpu = cluster.cluster_device_type() == "cuda"
        self._share = COLOCATED_SHARE if colocate_all else num_gpus_per_actor
        self._own_pg: PlacementGroup | None = None
        self._dp_size: int | None = None
        self.actor_infos: list[ActorInfo] = []
        self._handles: list[Any] = []
        try:
            self._place(pg, colocate_all, num_nodes)
            self._start()
        except BaseException:
            self.shutdown()
            raise

    # -- start

    def _place(self, pg: PlacementGroup | ResolvedPlacementGroup | None, colocate_all: bool, num_nodes: int) -> None:
        """Choose the bundle of each rank; None for each without a placement group."""
        self._bundles: list[int] | None = None
        self._pg: PlacementGroup | None = None
        if not self._on_gpu:
            return
        if colocate_all and (pg is None or pg.bundle_count != self.world_size):
            have = "none" if pg is None else f"{pg.bundle_count} bundles"
            raise ConfigError(
                f"{self.role}: trainer.placement.colocate_all=true needs a placement group with one bundle for each of "
                f"{self.world_size} ranks, got {have}"
            )
        if pg is None and self._num_gpus_per_node > 1:
            per_node = {"GPU": self._num_gpus_per_node, "CPU": self._num_gpus_per_node}
            pg = self._own_pg = placement_group([per_node] * num_nodes, strategy="PACK")
            get_ray_pg_ready_with_timeout(pg)
        if pg is None:
            return
        resolved = pg if isinstance(pg, ResolvedPlacementGroup) else ResolvedPlacementGroup(pg)
        self._pg = resolved.pg
        if resolved.bundle_count == self.world_size:
            self._bundles = list(resolved.reordered_bundle_indices)
        else:
            self._bundles = [rank // self._num_gpus_per_node for rank in range(self.world_size)]

    def _start(self) -> None:
        """Rank 0 first; the others get its address; then all join."""
        user_functions = export_user_functions()
        first = self._make_actor(0, None, user_functions)
        self._handles.append(first)
        address = self._wait("start (get_master_addr_port)", [first.get_master_addr_port.remote()])[0]
        self._handles += [self._make_actor(rank, address, user_functions) for rank in range(1, self.world_size)]
        refs = [handle.init_worker_process_group.remote() for handle in self._handles]
        ranks = self._wait("init_worker_process_group", refs)
        self.actor_infos = [ActorInfo(handle, rank) for handle, rank in zip(self._handles, ranks, strict=True)]

    def _make_actor(self, rank: int, address: tuple[str, int] | None, user_functions: Any) -> Any:
        threads = cpu_threads_per_rank(self.cfg.cpu_threads, self._num_gpus_per_node)
        options: dict[str, Any] = {
            "runtime_env": {"env_vars": worker_env(None if self._on_gpu else threads)},
            "num_cpus": self._share if self._on_gpu else CPUS_PER_CPU_WORKER,
            "num_gpus": self._share if self._on_gpu else 0,
            "resources": self._resources or None,
        }
        if self._pg is not None and self._bundles is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self._pg, placement_group_bundle_index=self._bundles[rank]
            )
        host, port = address or (None, None)
        return self._actor_type.options(**options).remote(
            self.cfg,
            world_size=self.world_size,
            rank=rank,
            local_rank=rank % self._num_gpus_per_node,
            master_addr=host,
            master_port=port,
            sequence_parallel_size=self._sequence_parallel_size,
            record_memory=self._record_memory,
            cpu_threads=None if self._on_gpu else threads,
            user_functions=user_functions,
        )

    def _wait(self, method: str, refs: list[Any]) -> list[Any]:
        return wait_for(Call(self.role, method, refs), self.cfg.worker_timeout_s)

    # -- calls

    def async_init_model(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Start `init_model` on all ranks; returns the refs."""
        return self.async_run_ray_method("pass_through", "init_model", *args, **kwargs)

    def async_run_ray_method(self, dispatch_type: str, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Start a method on all ranks (`DispatchRegistry` says how); returns the refs."""
        return DispatchRegistry.get(dispatch_type).dispatch(self.actor_infos, method, *args, **kwargs)

    def run(self, dispatch_type: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on all ranks and join the results.

        Raises:
            DeadlineError: After `trainer.worker_timeout_s`.
            WorkerError: A rank failed or died.
        """
        refs = self.async_run_ray_method(dispatch_type, method, *args, **kwargs)
        return DispatchRegistry.get(dispatch_type).collect(self.actor_infos, self._wait(method, refs))

    def finish(self, dispatch_type: str, method: str, refs: list[Any]) -> Any:
        """Wait for a call that was started, and join the results; raises like `run`."""
        return DispatchRegistry.get(dispatch_type).collect(self.actor_infos, self._wait(method, refs))

    async def run_async(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Call a method with the same arguments on all ranks without blocking the event loop; raises like `run`."""
        refs = self.async_run_ray_method("pass_through", method, *args, **kwargs)
        return await wait_for_async(Call(self.role, method, refs), timeout_s or self.cfg.worker_timeout_s)

    def offload_to_cpu(
        self, nonblocking: bool = False, offload_optimizer: bool = True, offload_model: bool = True
    ) -> list[Any] | None:
        """Move the role to host memory; with ``nonblocking`` returns the refs."""
        refs = self.async_run_ray_method(
            "pass_through", "offload_to_cpu", offload_optimizer=offload_optimizer, offload_model=offload_model
        )
        return refs if nonblocking else self.finish("pass_through", "offload_to_cpu", refs) and None

    def backload_to_gpu(
        self, nonblocking: bool = False, backload_optimizer: bool = True, backload_model: bool = True
    ) -> list[Any] | None:
        """Move the role to its device; with ``nonblocking`` returns the refs."""
        refs = self.async_run_ray_method(
            "pass_through", "backload_to_gpu", backload_optimizer=backload_optimizer, backload_model=backload_model
        )
        return refs if nonblocking else self.finish("pass_through", "backload_to_gpu", refs) and None

    def get_dp_size(self) -> int:
        """Data-parallel ranks.

        Raises:
            RuntimeError: The group has not started, or was shut down before it was asked.
        """
        if self.actor_infos:
            self._dp_size = self.actor_infos[0].rank.dp_size
        if self._dp_size is None:
            raise RuntimeError(f"the {self.role} group has no ranks yet")
        return self._dp_size

    def shutdown(self) -> None:
        """Kill all ranks and give the group's own placement back. Idempotent."""
        for handle in self._handles:
            ray.kill(handle, no_restart=True)
        self._handles, self.actor_infos = [], []
        if self._own_pg is not None:
            remove_placement_group(self._own_pg)
            self._own_pg = None


def cpu_threads_per_rank(configured: int | None, ranks_on_node: int) -> int:
    """Torch threads of one process without a GPU: what the config says, else the cores shared evenly."""
    if configured is not None:
        if configured < 1:
            raise ResourceError(f"trainer.cpu_threads={configured} must be at least 1, or null to share the cores")
        return configured
    return max(1, len(os.sched_getaffinity(0)) // ranks_on_node)


def worker_env(cpu_threads: int | None) -> dict[str, str]:
    """Environment of one rank: threads, and an allocator that keeps what torch frees (8 % of a CPU step).

    Threads wait without spinning: on a shared core a spinning one takes the time of the thread it waits for.
    """
    env = {"MALLOC_TRIM_THRESHOLD_": _KEEP_FREED_MEMORY, "MALLOC_MMAP_THRESHOLD_": _KEEP_FREED_MEMORY}
    if cpu_threads is not None:
        env |= {"OMP_NUM_THREADS": str(cpu_threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return env
