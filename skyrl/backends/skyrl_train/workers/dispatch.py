"""`WorkerDispatch`: the trainer's view of its models. It names a role, and the call reaches every rank.

Roles that share GPUs take turns: before a call the table of `residency` says what must move. On a CPU nothing does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from skyrl.algorithms.policy_losses import PolicyLossRegistry
from skyrl.algorithms.policy_losses.registry import PolicyLoss
from skyrl.algorithms.registries import export_user_functions
from skyrl.backends.skyrl_train import cluster
from skyrl.backends.skyrl_train.distributed.dispatch import (
    Boundaries,
    WorkerOutput,
    dispatch_from_staged,
    stage_chunks,
)
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.weight_sync.base import WeightMetadata
from skyrl.backends.skyrl_train.weight_sync.session import WeightSyncSession
from skyrl.backends.skyrl_train.workers.actor_group import PPORayActorGroup
from skyrl.backends.skyrl_train.workers.residency import Move, Parts, ResidencyTable
from skyrl.config.inference_engine import InferenceEngineConfig
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ConfigError
from skyrl.types.weights import FingerprintPlan

logger = logging.getLogger(__name__)

COPY_BYTES = 1 << 30
"""Parameters that travel at one time when the policy becomes the reference."""


class PolicyRanks:
    """The policy group as weight sync sees it (`weight_sync.base.TrainerRanks`)."""

    def __init__(self, group: PPORayActorGroup) -> None:
        self._group = group

    async def init(self, client: Any, ie_cfg: InferenceEngineConfig) -> WeightMetadata:
        """Run `init_weight_sync_state` on every rank; rank 0's metadata."""
        results = await self._group.run_async("init_weight_sync_state", client, ie_cfg)
        metadata: WeightMetadata = results[0]
        return metadata

    async def send(self, client: Any, ie_cfg: InferenceEngineConfig) -> dict[str, float]:
        """Run `broadcast_to_inference_engines` on every rank; rank 0's measurements."""
        results = await self._group.run_async("broadcast_to_inference_engines", client, ie_cfg)
        measured: dict[str, float] = results[0]
        return measured

    async def fingerprint(self, plan: FingerprintPlan) -> dict[str, str]:
        """Run `weight_fingerprint` on every rank; rank 0's hashes."""
        results = await self._group.run_async("weight_fingerprint", plan)
        hashes: dict[str, str] = results[0]
        return hashes


class WorkerDispatch:
    """Calls by role name: ``policy``, ``critic``, ``ref``, or any other that is registered.

    Every call raises DeadlineError after `trainer.worker_timeout_s`, and WorkerError naming role, rank and method
    when a rank fails or dies.
    """

    def __init__(
        self,
        cfg: SkyRLTrainConfig,
        policy_actor_group: PPORayActorGroup,
        critic_actor_group: PPORayActorGroup | None = None,
        ref_actor_group: PPORayActorGroup | None = None,
        inference_engine_client: Any | None = None,
    ) -> None:
        self.cfg = cfg
        self._client = inference_engine_client
        self._session: WeightSyncSession | None = None
        self._groups: dict[str, PPORayActorGroup] = {}
        self._known_losses: dict[str, dict[str, PolicyLoss]] = {}
        self._on_gpu = cluster.cluster_device_type() == "cuda"
        self._residency = ResidencyTable({})
        roles = {"policy": policy_actor_group, "critic": critic_actor_group, "ref": ref_actor_group}
        for role, group in roles.items():
            if group is not None:
                self.register_actor_group(role, group)

    # -- roles

    def register_actor_group(self, model: str, group: PPORayActorGroup) -> None:
        """Make a role known; it starts offloaded where it shares GPUs."""
        self._groups[model] = group
        self._known_losses[model] = {}
        shared = self._shared_group_of(model)
        if shared is not None:
            self._residency.add_role(model, shared)

    def _shared_group_of(self, role: str) -> str | None:
        placement = self.cfg.trainer.placement
        if not self._on_gpu:
            return None
        if placement.colocate_all:
            return "all"
        return "policy_ref" if placement.colocate_policy_ref and role in {"policy", "ref"} else None

    def _group(self, model: str) -> PPORayActorGroup:
        if model not in self._groups:
            raise ConfigError(f"no model called {model!r} was built; there are {sorted(self._groups)}")
        return self._groups[model]

    @property
    def engines_share_devices(self) -> bool:
        """Whether inference engines must sleep while models train."""
        return self._on_gpu and self.cfg.trainer.placement.colocate_all

    def dp_size(self, model: str) -> int:
        """Data-parallel ranks of a role."""
        return self._group(model).get_dp_size()

    def get_lcm_dp_size(self) -> int:
        """Least common multiple over all roles: batches of a multiple of it divide everywhere."""
        return math.lcm(*(group.get_dp_size() for group in self._groups.values()))

    def get_node_ids(self) -> list[str]:
        """Ray node ids on which ranks live, each once."""
        found = [node for group in self._groups.values() for node in group.run("pass_through", "get_ray_node_id")]
        return list(dict.fromkeys(found))

    # -- residency

    def _move(self, moves: Sequence[Move]) -> None:
        for move in moves:
            group, parts = self._groups[move.role], move.parts
            if move.to_device:
                group.backload_to_gpu(backload_optimizer=parts.optimizer, backload_model=parts.model)
            else:
                group.offload_to_cpu(offload_optimizer=parts.optimizer, offload_model=parts.model)

    def _ensure(self, model: str, *, optimizer: bool, parameters: bool = True) -> None:
        self._move(self._residency.ensure(model, model=parameters, optimizer=optimizer))

    def mark_as_offloaded(self, model: str) -> None:
        """Record that the role's parts are in host memory."""
        self._residency.mark(model, Parts())

    def mark_all_offloaded(self) -> None:
        """Record that every role's parts are in host memory."""
        self._residency.mark_all_offloaded(self._groups)

    def empty_cache(self, model: str | None = None) -> None:
        """Give cached GPU memory of one role, or of all, back."""
        if not self._on_gpu:
            return
        for role in [model] if model is not None else list(self._groups):
            self._group(role).run("pass_through", "empty_cache")

    # -- building

    def init_model(self, model: str, model_path: str, num_training_steps: int | None = None) -> None:
        """Load a role's model on all its ranks."""
        self._move(self._residency.evict_others(model))
        self._group(model).run("pass_through", "init_model", model_path, num_training_steps=num_training_steps)
        self._residency.mark(model, Parts(model=True, optimizer=model != "ref"))

    # -- compute

    def forward(
        self,
        model: str,
        data: TrainingInputBatch,
        loss_fn: str | None = None,
        loss_fn_config: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        **worker_kwargs: Any,
    ) -> WorkerOutput:
        """Forward without gradients: ``logprobs`` or ``values`` as tensors; with ``loss_fn`` also metrics."""
        self._refuse_adapter(model_id)
        self._prepare(model, optimizer=False, loss_fn=loss_fn)
        options = _given(loss_fn=loss_fn, loss_fn_config=loss_fn_config, **worker_kwargs)
        output: WorkerOutput = self._group(model).run("mesh", "forward", data, **options)
        return output

    def forward_from_staged(
        self,
        model: str,
        chunk_refs: Sequence[Any],
        loss_fn: str | None = None,
        loss_fn_config: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        **worker_kwargs: Any,
    ) -> WorkerOutput:
        """`forward` on chunks that `stage_data` put into the object store."""
        self._refuse_adapter(model_id)
        self._prepare(model, optimizer=False, loss_fn=loss_fn)
        options = _given(loss_fn=loss_fn, loss_fn_config=loss_fn_config, **worker_kwargs)
        return self._run_staged(model, "forward", chunk_refs, options)

    def forward_backward(
        self,
        model: str,
        data: TrainingInputBatch,
        loss_fn: str | None = None,
        loss_fn_config: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        **worker_kwargs: Any,
    ) -> WorkerOutput:
        """Add the gradient of a (mini-)batch; metrics over all ranks."""
        self._refuse_adapter(model_id)
        self._prepare(model, optimizer=True, loss_fn=loss_fn)
        options = _given(loss_fn=loss_fn, loss_fn_config=loss_fn_config, **worker_kwargs)
        output: WorkerOutput = self._group(model).run("mesh", "forward_backward", data, **options)
        return output

    def forward_backward_from_staged(
        self,
        model: str,
        chunk_refs: Sequence[Any],
        loss_fn: str | None = None,
        loss_fn_config: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        **worker_kwargs: Any,
    ) -> WorkerOutput:
        """`forward_backward` on staged chunks."""
        self._refuse_adapter(model_id)
        self._prepare(model, optimizer=True, loss_fn=loss_fn)
        options = _given(loss_fn=loss_fn, loss_fn_config=loss_fn_config, **worker_kwargs)
        return self._run_staged(model, "forward_backward", chunk_refs, options)

    def stage_data(self, model: str, data: TrainingInputBatch, boundaries: Boundaries) -> list[list[Any]]:
        """Put mini-batches into the object store once: ``refs[mini_batch][dp]``; rows are padded to the dp size."""
        return stage_chunks(self.dp_size(model), data, boundaries)

    def _prepare(self, model: str, *, optimizer: bool, loss_fn: str | None) -> None:
        self._ensure(model, optimizer=optimizer)
        if loss_fn is not None or optimizer:
            self._ship_new_losses(model)

    def _ship_new_losses(self, model: str) -> None:
        """Losses that were registered, or registered anew, after the group started reach its ranks before their use."""
        functions, known = PolicyLossRegistry.user_functions(), self._known_losses[model]
        if any(known.get(name) is not function for name, function in functions.items()):
            self._group(model).run("pass_through", "import_user_functions", export_user_functions())
            self._known_losses[model] = functions

    def _run_staged(self, model: str, method: str, refs: Sequence[Any], options: dict[str, Any]) -> WorkerOutput:
        group = self._group(model)
        output: WorkerOutput = group.finish(
            "mesh", method, dispatch_from_staged(group.actor_infos, method, refs, **options)
        )
        return output

    def optim_step(self, model: str, model_id: str | None = None) -> float:
        """Step the optimizer; the gradient norm before clipping. Not finite means that the step was skipped."""
        self._refuse_adapter(model_id)
        self._ensure(model, optimizer=True)
        norm = self._group(model).run("pass_through", "optim_step")[0]
        return float(norm)

    def set_lr(self, model: str, lr: float, model_id: str | None = None) -> None:
        """Set the learning rate by hand, from now on."""
        self._refuse_adapter(model_id)
        self._ensure(model, optimizer=True, parameters=False)
        self._group(model).run("pass_through", "set_lr", lr)

    def set_algorithm_config(self, model: str, **fields: Any) -> None:
        """Set fields of the algorithm config of every rank for all later calls."""
        self._group(model).run("pass_through", "set_algorithm_config", **fields)

    # -- files

    def save_checkpoint(
        self, model: str, ckpt_dir: str, tokenizer: Any | None = None, model_id: str | None = None
    ) -> None:
        """Write the role's model, optimizer, schedule and random state; raises CheckpointError."""
        self._refuse_adapter(model_id)
        self._ensure(model, optimizer=True)
        self._group(model).run("pass_through", "save_checkpoint", ckpt_dir, tokenizer)

    def load_checkpoint(
        self,
        model: str,
        ckpt_dir: str,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        model_id: str | None = None,
    ) -> None:
        """Read a checkpoint that any number of ranks wrote."""
        self._refuse_adapter(model_id)
        self._ensure(model, optimizer=load_optimizer_states)
        self._group(model).run(
            "pass_through", "load_checkpoint", ckpt_dir, load_optimizer_states, load_lr_scheduler_states
        )

    def finalize_pending_saves(self, model: str) -> None:
        """Wait for checkpoints that are still being written."""
        self._group(model).run("pass_through", "finalize_pending_saves")

    def save_hf_model(self, model: str, export_dir: str, tokenizer: Any | None = None) -> None:
        """Export a Hugging Face directory; raises CheckpointError."""
        self._ensure(model, optimizer=False)
        self._group(model).run("pass_through", "save_hf_model", export_dir, tokenizer)

    def copy_policy_to_ref(self) -> None:
        """Make the policy's weights the reference's, through the object store, `COPY_BYTES` at a time."""
        policy, ref = self._group("policy"), self._group("ref")
        sizes: list[tuple[str, int]] = policy.run("pass_through", "parameter_sizes")[0]
        for names in _group_names(sizes, COPY_BYTES):
            self._ensure("policy", optimizer=False)
            refs = policy.async_run_ray_method("pass_through", "gather_parameters", names)
            values = ray.put(policy.finish("pass_through", "gather_parameters", refs)[0])
            self._ensure("ref", optimizer=False)
            ref.run("pass_through", "load_parameters", values)

    # -- weight sync

    def set_inference_engine_client(self, client: Any) -> None:
        """Name the engines that get the policy's weights."""
        self._client, self._session = client, None

    async def init_weight_sync_state(self, client: Any | None = None) -> None:
        """Connect the policy's ranks and the engines."""
        if client is not None:
            self.set_inference_engine_client(client)
        await self._weight_session().init()

    async def save_weights_for_sampler(self, model_id: str | None = None) -> dict[str, float]:
        """Give the engines the policy's weights, and prove it; returns ``weight_sync/*``.

        Raises:
            RuntimeError: There is no client.
            WeightSyncError: The engines did not get the weights and stay paused.
        """
        self._refuse_adapter(model_id)
        session = self._weight_session()
        self._move(self._residency.release("policy", model=False, optimizer=True))
        self._ensure("policy", optimizer=False)
        return await session.push()

    def _weight_session(self) -> WeightSyncSession:
        if self._client is None:
            raise RuntimeError("no inference client: pass one to WorkerDispatch or call set_inference_engine_client")
        if self._session is None:
            trainer, fully_async = self.cfg.trainer, self.cfg.trainer.fully_async
            self._session = WeightSyncSession(
                self._client,
                PolicyRanks(self._group("policy")),
                self.cfg.generator.inference_engine,
                seed=trainer.seed,
                device_type="cuda" if self._on_gpu else "cpu",
                colocated=trainer.placement.colocate_all,
                reset_cache=not fully_async.enabled or fully_async.clear_kv_cache_on_weight_sync,
                release_trainer_memory=self._release_policy,
            )
        return self._session

    async def _release_policy(self) -> None:
        self._move(self._residency.release("policy", model=True, optimizer=True))

    @staticmethod
    def _refuse_adapter(model_id: str | None) -> None:
        if model_id is not None:
            raise ConfigError(
                f"model_id={model_id!r}: adapters are not built yet; leave it out to train the whole model"
            )


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _group_names(sizes: Sequence[tuple[str, int]], limit: int) -> list[list[str]]:
    """Cut names into runs of at most ``limit`` bytes; one that is larger stands alone."""
    groups: list[list[str]] = []
    used = limit
    for name, size in sizes:
        if used + size > limit or not groups:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups
