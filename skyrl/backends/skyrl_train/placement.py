"""Where actors go: GPU demand against what the cluster has, and placement groups.

On a cluster without GPUs a role's `*_num_gpus_per_node` counts processes; they need no placement group.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl.config.root import SkyRLTrainConfig
from skyrl.env_vars import SKYRL_RAY_PG_TIMEOUT_IN_S
from skyrl.errors import ResourceError

logger = logging.getLogger(__name__)

CPUS_PER_CPU_WORKER = 0.2
"""Ray CPUs that a training process on a host without GPUs asks for: a token amount, so that many fit two cores."""
COLOCATED_SHARE = 0.2
"""GPU share of one role's rank, and of an engine's worker, when all roles and an engine share a GPU."""
ENGINES_KEY = "generator.inference_engine.num_engines"
_INFO_TASK_CPUS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """GPUs that one part of a run takes for itself.

    Example: `Demand(key="trainer.placement.policy_num_gpus_per_node", nodes=2, per_node=8)`.
    """

    key: str
    """Config key to name when there are too few."""
    nodes: int
    """Nodes, each with `per_node` GPUs."""
    per_node: int
    """GPUs on one node."""

    @property
    def total(self) -> int:
        """GPUs on all nodes."""
        return self.nodes * self.per_node


def gpu_demands(cfg: SkyRLTrainConfig, *, trains: bool = True) -> list[Demand]:
    """What a run needs at the same time; roles that share GPUs count once.

    Args:
        cfg: The run.
        trains: Whether it has training roles; without them the engines share GPUs with nobody.
    """
    if not trains:
        return _engine_demands(cfg)
    placement, algorithm = cfg.trainer.placement, cfg.trainer.algorithm

    def role(name: str) -> Demand:
        values = vars(placement)
        return Demand(
            key=f"trainer.placement.{name}_num_gpus_per_node",
            nodes=values[f"{name}_num_nodes"],
            per_node=values[f"{name}_num_gpus_per_node"],
        )

    demands = [role("policy")]
    if placement.colocate_all:
        return demands
    if (algorithm.use_kl_loss or algorithm.use_kl_in_reward) and not placement.colocate_policy_ref:
        demands.append(role("ref"))
    if cfg.trainer.critic.model.path is not None:
        demands.append(role("critic"))
    return demands + _engine_demands(cfg)


def _engine_demands(cfg: SkyRLTrainConfig) -> list[Demand]:
    engines = cfg.generator.inference_engine
    if not engines.run_engines_locally:
        return []
    per_engine = engines.tensor_parallel_size * engines.pipeline_parallel_size * engines.data_parallel_size
    # Engines are spread over nodes by Ray: only their sum is known here.
    return [Demand(key=ENGINES_KEY, nodes=engines.num_engines * per_engine, per_node=1)]


def cpu_processes(cfg: SkyRLTrainConfig, *, trains: bool = True) -> int:
    """Processes of a run on a cluster without GPUs: ranks of the roles, if it ``trains``, and engines."""
    placement, algorithm, engines = cfg.trainer.placement, cfg.trainer.algorithm, cfg.generator.inference_engine
    processes = engines.num_engines * engines.data_parallel_size if engines.run_engines_locally else 0
    if not trains:
        return processes
    processes += placement.policy_num_nodes * placement.policy_num_gpus_per_node
    if algorithm.use_kl_loss or algorithm.use_kl_in_reward:
        processes += placement.ref_num_nodes * placement.ref_num_gpus_per_node
    if cfg.trainer.critic.model.path is not None:
        processes += placement.critic_num_nodes * placement.critic_num_gpus_per_node
    return processes


def require_gpus(demands: Sequence[Demand], gpus_by_node: Sequence[int]) -> None:
    """Refuse a run that the cluster cannot hold, before anything waits for GPUs that never come.

    Args:
        demands: What the parts of the run take.
        gpus_by_node: GPUs of each node.

    Raises:
        ResourceError: Names the key, its value and what there is.
    """
    have = sum(gpus_by_node)
    for demand in demands:
        if demand.per_node > max(gpus_by_node, default=0):
            raise ResourceError(
                f"{demand.key}={demand.per_node} asks for more GPUs than any node has "
                f"(the largest has {max(gpus_by_node, default=0)}); ask for fewer per node or use more nodes"
            )
    need = sum(demand.total for demand in demands)
    if need > have:
        parts = ", ".join(f"{demand.key} takes {demand.total}" for demand in demands)
        share = " set trainer.placement.colocate_all=true so that roles and engines share GPUs," * (len(demands) > 1)
        raise ResourceError(
            f"the run needs {need} GPUs and the cluster has {have}: {parts}; lower these,{share} or add nodes"
        )


def require_cpus(processes: int, cpus: float, *, reserved: float = 1.0) -> None:
    """Refuse more processes than a cluster without GPUs can schedule beside the controller.

    Raises:
        ResourceError: Names the keys and what there is.
    """
    need = reserved + processes * CPUS_PER_CPU_WORKER
    if need > cpus:
        most = max(0, int((cpus - reserved) / CPUS_PER_CPU_WORKER + 1e-9))
        raise ResourceError(
            f"trainer.placement.*_num_gpus_per_node and {ENGINES_KEY} ask for {processes} processes, and a cluster "
            f"with {cpus:g} CPUs and no GPU holds {most} ({CPUS_PER_CPU_WORKER} CPU each); ask for fewer"
        )


class ResolvedPlacementGroup:
    """A ready placement group and the order in which its one-GPU bundles should be used.

    Bundles of one node are neighbours in that order, sorted by GPU id, so that ranks next to each other can use
    the fastest links.
    """

    def __init__(self, pg: PlacementGroup) -> None:
        self.pg = pg

    @property
    def bundle_count(self) -> int:
        """Number of bundles."""
        return self.pg.bundle_count

    @cached_property
    def _locations(self) -> list[tuple[str, int]]:
        has_gpu = [bundle.get("GPU", 0) > 0 for bundle in self.pg.bundle_specs]
        refs = [
            _bundle_location.options(
                num_cpus=_INFO_TASK_CPUS,
                num_gpus=_INFO_TASK_CPUS if gpu else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self.pg, placement_group_bundle_index=index
                ),
            ).remote()
            for index, gpu in enumerate(has_gpu)
        ]
        return list(ray.get(refs, timeout=SKYRL_RAY_PG_TIMEOUT_IN_S))

    @cached_property
    def reordered_bundle_indices(self) -> list[int]:
        """Bundle indices sorted by node, then by GPU id."""
        return sort_bundles(self._locations)

    @cached_property
    def bundle_node_ids(self) -> list[str]:
        """Node of each bundle, by bundle index."""
        return [node for node, _ in self._locations]

    @cached_property
    def bundle_gpu_ids(self) -> list[int]:
        """Physical GPU id of each bundle, by bundle index; -1 without a GPU."""
        return [gpu for _, gpu in self._locations]


def sort_bundles(locations: Sequence[tuple[str, int]]) -> list[int]:
    """Order bundle indices by (node, GPU id); the node of bundle 0 comes first, so that rank 0 stays there."""
    nodes = list(dict.fromkeys(node for node, _ in locations))
    return sorted(range(len(locations)), key=lambda index: (nodes.index(locations[index][0]), locations[index][1]))


@ray.remote
def _bundle_location() -> tuple[str, int]:
    ids = ray.get_gpu_ids()
    return ray.get_runtime_context().get_node_id(), int(ids[0]) if ids else -1


def get_ray_pg_ready_with_timeout(pg: PlacementGroup, timeout: float = SKYRL_RAY_PG_TIMEOUT_IN_S) -> None:
    """Wait until Ray has reserved a placement group.

    Raises:
        ResourceError: It took longer than `timeout` seconds; the group is given back.
    """
    if pg.wait(timeout):
        return
    bundles = [{name: amount for name, amount in bundle.items() if amount} for bundle in pg.bundle_specs]
    state = _state_name(pg)
    remove_placement_group(pg)
    raise ResourceError(
        f"Ray could not reserve {bundles} within {timeout:g} s (SKYRL_RAY_PG_TIMEOUT_IN_S={timeout:g}; state {state}); "
        f"free now: {_free_resources()}. Another job may hold the GPUs, or no node has that many"
    )


def _state_name(pg: PlacementGroup) -> str:
    table: dict[str, Any] = placement_group_table(pg)
    return str(table.get("state", "unknown"))


def _free_resources() -> dict[str, float]:
    return {name: amount for name, amount in ray.available_resources().items() if name in {"CPU", "GPU"}}


def create_colocate_pg(
    cfg: SkyRLTrainConfig, timeout: float = SKYRL_RAY_PG_TIMEOUT_IN_S
) -> ResolvedPlacementGroup | None:
    """Reserve the GPUs that trainer and engines share, one per bundle; None when they share none.

    Raises:
        ResourceError: Ray could not reserve them in time.
    """
    placement = cfg.trainer.placement
    if not placement.colocate_all or not ray.cluster_resources().get("GPU"):
        return None
    world = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    pg = placement_group([{"GPU": 1, "CPU": 1}] * world, strategy="PACK")
    get_ray_pg_ready_with_timeout(pg, timeout)
    return ResolvedPlacementGroup(pg)
