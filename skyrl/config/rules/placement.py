"""Rules of placement: which role and which engine gets how many GPUs."""

from __future__ import annotations

from skyrl.config.inference_engine import InferenceEngineConfig
from skyrl.config.rules.batches import uses_critic, uses_ref
from skyrl.config.trainer import TrainerConfig
from skyrl.errors import ConfigError

_KEY = "trainer.placement"


def check_placement(trainer: TrainerConfig, engine: InferenceEngineConfig) -> None:
    """Check that roles and engines which share GPUs agree on their number.

    Raises:
        ConfigError: numbers that must agree differ.
    """
    place = trainer.placement
    policy = (place.policy_num_nodes, place.policy_num_gpus_per_node)
    ref = (place.ref_num_nodes, place.ref_num_gpus_per_node)
    critic = (place.critic_num_nodes, place.critic_num_gpus_per_node)
    if place.colocate_all:
        _check_shared_engines(trainer, engine)
    if uses_ref(trainer) and (place.colocate_all or place.colocate_policy_ref):
        _require_same("ref", policy, ref, "colocate_all" if place.colocate_all else "colocate_policy_ref")
    if uses_critic(trainer) and place.colocate_all:
        _require_same("critic", policy, critic, "colocate_all")


def _check_shared_engines(trainer: TrainerConfig, engine: InferenceEngineConfig) -> None:
    place = trainer.placement
    policy_gpus = place.policy_num_nodes * place.policy_num_gpus_per_node
    per_replica = engine.tensor_parallel_size * engine.pipeline_parallel_size
    engine_gpus = engine.num_engines * per_replica * engine.data_parallel_size
    if policy_gpus != engine_gpus:
        raise ConfigError(
            f"{_KEY}.colocate_all=true needs as many GPUs for engines as for the policy: the policy has "
            f"{_KEY}.policy_num_nodes x policy_num_gpus_per_node = {policy_gpus}, engines have "
            f"generator.inference_engine.num_engines x tensor x pipeline x data_parallel_size = {engine_gpus}"
        )
    if engine.distributed_executor_backend == "mp" and per_replica > place.policy_num_gpus_per_node:
        raise ConfigError(
            "generator.inference_engine.distributed_executor_backend=mp keeps an engine on one node: its "
            f"tensor x pipeline parallel size = {per_replica} must be at most "
            f"{_KEY}.policy_num_gpus_per_node={place.policy_num_gpus_per_node}"
        )


def _require_same(role: str, policy: tuple[int, int], other: tuple[int, int], switch: str) -> None:
    if policy != other:
        raise ConfigError(
            f"{_KEY}.{switch}=true needs equal shapes: {_KEY}.policy_num_nodes x policy_num_gpus_per_node = "
            f"{policy[0]} x {policy[1]}, {_KEY}.{role}_num_nodes x {role}_num_gpus_per_node = {other[0]} x {other[1]}"
        )
