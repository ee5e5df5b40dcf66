"""Start the actor groups that a run needs, and load their models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from skyrl.backends.skyrl_train import cluster
from skyrl.backends.skyrl_train.placement import ResolvedPlacementGroup, get_ray_pg_ready_with_timeout
from skyrl.backends.skyrl_train.workers.actor_group import PPORayActorGroup
from skyrl.backends.skyrl_train.workers.dispatch import WorkerDispatch
from skyrl.config.root import SkyRLTrainConfig

logger = logging.getLogger(__name__)

POLICY_SHARE, REF_SHARE = 0.75, 0.25
"""GPU shares where only policy and reference share GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleClasses:
    """Worker class of each role, for example those of `workers.fsdp.fsdp_worker`."""

    policy: Any
    """Of the model that learns."""
    critic: Any
    """Of the value model."""
    ref: Any
    """Of the reference."""


@dataclass(slots=True, kw_only=True)
class ModelGroups:
    """Running actor groups; a role that the run does not need is None."""

    policy: PPORayActorGroup
    """The model that learns."""
    critic: PPORayActorGroup | None
    """The value model."""
    ref: PPORayActorGroup | None
    """The reference."""
    shared_pg: PlacementGroup | None = None
    """Placement group that `start_models` made for policy and reference."""
    _preloading: list[Any] = field(default_factory=list)

    def by_role(self) -> dict[str, PPORayActorGroup]:
        """The groups that exist, reference first: it leaves the GPU before the larger policy comes."""
        roles = {"ref": self.ref, "policy": self.policy, "critic": self.critic}
        return {role: group for role, group in roles.items() if group is not None}

    def load(
        self, cfg: SkyRLTrainConfig, total_training_steps: int | None, client: Any | None = None
    ) -> WorkerDispatch:
        """Load every model; one after the other on shared GPUs, else all at once.

        Args:
            cfg: The run.
            total_training_steps: Steps of the run, for schedules; None when unknown.
            client: Inference client that gets the policy's weights.

        Raises:
            ModelLoadError: A path holds no usable model.
            WorkerError, DeadlineError: A rank failed or took too long.
        """
        dispatch = WorkerDispatch(cfg, self.policy, self.critic, self.ref, client)
        paths, groups = model_paths(cfg), self.by_role()

        def load_role(role: str) -> None:
            dispatch.init_model(role, paths[role], scheduler_steps(cfg, role, total_training_steps))

        def load_in_turn(roles: list[str]) -> None:
            for role in roles:
                load_role(role)
                groups[role].offload_to_cpu()
                dispatch.mark_as_offloaded(role)

        sharing = _roles_that_share_gpus(cfg, list(groups))
        _at_once(
            [partial(load_in_turn, sharing), *(partial(load_role, role) for role in groups if role not in sharing)]
        )
        return dispatch

    def shutdown(self) -> None:
        """Kill all ranks. Idempotent."""
        for group in self.by_role().values():
            group.shutdown()
        if self.shared_pg is not None:
            remove_placement_group(self.shared_pg)
            self.shared_pg = None


def _roles_that_share_gpus(cfg: SkyRLTrainConfig, roles: list[str]) -> list[str]:
    """Those of the roles that take turns on their GPUs, in the order given; none on a CPU."""
    placement = cfg.trainer.placement
    if cluster.cluster_device_type() != "cuda":
        return []
    if placement.colocate_all:
        return roles
    pair = placement.colocate_policy_ref and "ref" in roles
    return [role for role in roles if role in {"ref", "policy"}] if pair else []


def _at_once(calls: list[Callable[[], None]]) -> None:
    """Run blocking calls in threads; the first error is raised after all have ended."""
    with ThreadPoolExecutor(len(calls), thread_name_prefix="build-models") as pool:
        futures = [pool.submit(call) for call in calls]
    for future in futures:
        future.result()


def _start_all(starts: Mapping[str, Callable[[], PPORayActorGroup]]) -> dict[str, PPORayActorGroup]:
    """Start groups at once; if one cannot start, those that did are shut down before its error is raised."""
    with ThreadPoolExecutor(len(starts), thread_name_prefix="start-models") as pool:
        futures = {role: pool.submit(start) for role, start in starts.items()}
    try:
        return {role: future.result() for role, future in futures.items()}
    except BaseException:
        for future in futures.values():
            if future.exception() is None:
                future.result().shutdown()
        raise


def model_paths(cfg: SkyRLTrainConfig) -> dict[str, str]:
    """Model of each role."""
    trainer = cfg.trainer
    policy = trainer.policy.model.path or ""
    return {"policy": policy, "ref": trainer.ref.model.path or policy, "critic": trainer.critic.model.path or ""}


def scheduler_steps(cfg: SkyRLTrainConfig, role: str, total_training_steps: int | None) -> int | None:
    """Optimizer steps of a role over the whole run; None when the run's length is unknown."""
    if total_training_steps is None or role == "ref":
        return None
    trainer = cfg.trainer
    mini = trainer.critic_mini_batch_size if role == "critic" else trainer.policy_mini_batch_size
    return total_training_steps * (trainer.train_batch_size // mini) * trainer.update_epochs_per_batch


def start_models(
    cfg: SkyRLTrainConfig, roles: RoleClasses, colocate_pg: ResolvedPlacementGroup | None = None
) -> ModelGroups:
    """Start the ranks of every role that the run needs, and let them read their models already.

    Models are loaded into host memory in the background: it overlaps with the start of inference engines, and
    `ModelGroups.load` finds them there.

    Raises:
        ResourceError: Ray cannot place the ranks in time.
        WorkerError: A rank died at its start.
    """
    wanted = _wanted_roles(cfg, roles)
    shared_pg = _reserve_for_two(cfg) if "ref" in wanted else None
    try:
        starts = {
            role: partial(_start_group, cfg, role, worker, shared_pg, colocate_pg) for role, worker in wanted.items()
        }
        started = _start_all(starts)
    except BaseException:
        if shared_pg is not None:
            remove_placement_group(shared_pg)
        raise
    groups = ModelGroups(
        policy=started["policy"], critic=started.get("critic"), ref=started.get("ref"), shared_pg=shared_pg
    )
    paths = model_paths(cfg)
    try:
        for role, group in groups.by_role().items():
            # An error on a rank comes again, and is raised, when `load` asks for the same model.
            groups._preloading += group.async_run_ray_method("pass_through", "load_weights", paths[role])
    except BaseException:
        groups.shutdown()
        raise
    return groups


def _wanted_roles(cfg: SkyRLTrainConfig, roles: RoleClasses) -> dict[str, Any]:
    """Worker class of each role that the run needs."""
    algorithm = cfg.trainer.algorithm
    wanted = {"policy": roles.policy}
    if algorithm.use_kl_loss or algorithm.use_kl_in_reward:
        wanted["ref"] = roles.ref
    if cfg.trainer.critic.model.path is not None:
        wanted["critic"] = roles.critic
    return wanted


def _reserve_for_two(cfg: SkyRLTrainConfig) -> PlacementGroup | None:
    """Reserve the GPUs that only policy and reference share; None where they share none, or share with all."""
    placement = cfg.trainer.placement
    if not placement.colocate_policy_ref or placement.colocate_all or cluster.cluster_device_type() != "cuda":
        return None
    bundle = {"GPU": placement.policy_num_gpus_per_node, "CPU": placement.policy_num_gpus_per_node}
    group = placement_group([bundle] * placement.policy_num_nodes, strategy="PACK")
    get_ray_pg_ready_with_timeout(group)
    return group


def _start_group(
    cfg: SkyRLTrainConfig,
    role: str,
    worker: Any,
    shared_pg: PlacementGroup | None,
    colocate_pg: ResolvedPlacementGroup | None,
) -> PPORayActorGroup:
    placement = cfg.trainer.placement
    pair = shared_pg is not None and role in {"policy", "ref"}
    share = {"policy": POLICY_SHARE, "ref": REF_SHARE}[role] if pair else 1.0
    return PPORayActorGroup(
        cfg.trainer,
        num_nodes=vars(placement)[f"{role}_num_nodes"],
        num_gpus_per_node=vars(placement)[f"{role}_num_gpus_per_node"],
        ray_actor_type=worker,
        pg=shared_pg if pair else colocate_pg,
        num_gpus_per_actor=share,
        colocate_all=placement.colocate_all,
        sequence_parallel_size=vars(cfg.trainer)[role].sequence_parallel_size,
        record_memory=role == "policy" and cfg.trainer.policy.record_memory,
        role=role,
    )
