"""Start the actor groups that a run needs, and load their models."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
        paths = model_paths(cfg)
        if cluster.cluster_device_type() == "cuda" and cfg.trainer.placement.colocate_all:
            for role, group in self.by_role().items():
                dispatch.init_model(role, paths[role], scheduler_steps(cfg, role, total_training_steps))
                group.offload_to_cpu()
                dispatch.mark_as_offloaded(role)
            return dispatch
        _at_once(
            [
                _loader(dispatch, role, paths[role], scheduler_steps(cfg, role, total_training_steps))
                for role in self.by_role()
            ]
        )
        return dispatch

    def shutdown(self) -> None:
        """Kill all ranks. Idempotent."""
        for group in self.by_role().values():
            group.shutdown()
        if self.shared_pg is not None:
            remove_placement_group(self.shared_pg)
            self.shared_pg = None


def _loader(dispatch: WorkerDispatch, role: str, path: str, steps: int | None) -> Callable[[], None]:
    return lambda: dispatch.init_model(role, path, steps)


def _at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run blocking calls in threads; the first error is raised after all have ended."""
    with ThreadPoolExecutor(max(1, len(calls)), thread_name_prefix="build-models") as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


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
    algorithm, placement = cfg.trainer.algorithm, cfg.trainer.placement
    wanted = {"policy": roles.policy}
    if algorithm.use_kl_loss or algorithm.use_kl_in_reward:
        wanted["ref"] = roles.ref
    if cfg.trainer.critic.model.path is not None:
        wanted["critic"] = roles.critic
    shared_pg = None
    share_two = placement.colocate_policy_ref and not placement.colocate_all and "ref" in wanted
    if share_two and cluster.cluster_device_type() == "cuda":
        bundle = {"GPU": placement.policy_num_gpus_per_node, "CPU": placement.policy_num_gpus_per_node}
        shared_pg = placement_group([bundle] * placement.policy_num_nodes, strategy="PACK")
        get_ray_pg_ready_with_timeout(shared_pg)

    def start(role: str, worker: Any) -> Callable[[], PPORayActorGroup]:
        pair = shared_pg is not None and role in {"policy", "ref"}
        share = {"policy": POLICY_SHARE, "ref": REF_SHARE}[role] if pair else 1.0
        return lambda: PPORayActorGroup(
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

    started = dict(zip(wanted, _at_once([start(role, worker) for role, worker in wanted.items()]), strict=True))
    groups = ModelGroups(
        policy=started["policy"], critic=started.get("critic"), ref=started.get("ref"), shared_pg=shared_pg
    )
    paths = model_paths(cfg)
    for role, group in groups.by_role().items():
        # An error here comes again, and is raised, when `load` asks for the same model.
        groups._preloading += group.async_run_ray_method("pass_through", "load_weights", paths[role])
    return groups
