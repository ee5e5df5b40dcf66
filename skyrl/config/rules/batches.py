"""Rules of batch sizes: how prompts divide into mini-batches, ranks and micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from skyrl.config.megatron import MegatronConfig
from skyrl.config.rules.choices import require_positive
from skyrl.config.trainer import TrainerConfig
from skyrl.errors import ConfigError


def fsdp_data_parallel_size(role: str, world_size: int, sequence_parallel_size: int) -> int:
    """Ranks of an FSDP role that see different data.

    Raises:
        ConfigError: the world size is no multiple of the sequence parallel size.
    """
    key = f"trainer.{role}.sequence_parallel_size"
    require_positive(key, sequence_parallel_size)
    if world_size % sequence_parallel_size:
        raise ConfigError(f"{key}={sequence_parallel_size} must divide the {world_size} GPUs of the {role}")
    return world_size // sequence_parallel_size


def megatron_data_parallel_size(role: str, world_size: int, megatron: MegatronConfig) -> int:
    """Ranks of a Megatron role that see different data: world / (tp * pp * cp).

    Raises:
        ConfigError: the parallel sizes do not divide the world size.
    """
    key = f"trainer.{role}.megatron_config"
    tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    context, expert = megatron.context_parallel_size, megatron.expert_model_parallel_size
    expert_tensor = tensor if megatron.expert_tensor_parallel_size is None else megatron.expert_tensor_parallel_size
    for name, size in (("tensor", tensor), ("pipeline", pipeline), ("context", context), ("expert", expert)):
        require_positive(f"{key}.{name}_{'' if name == 'context' else 'model_'}parallel_size", size)
    require_positive(f"{key}.expert_tensor_parallel_size", expert_tensor)
    if world_size % (tensor * pipeline * context):
        raise ConfigError(
            f"{key}: tensor x pipeline x context parallel size = {tensor} x {pipeline} x {context} must divide the "
            f"{world_size} GPUs of the {role}"
        )
    if world_size % (pipeline * expert * expert_tensor):
        raise ConfigError(
            f"{key}: pipeline x expert x expert tensor parallel size = {pipeline} x {expert} x {expert_tensor} must "
            f"divide the {world_size} GPUs of the {role}"
        )
    return world_size // (tensor * pipeline * context)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelSizes:
    """Ranks of each role that see different data."""

    policy: int
    """Of the policy."""
    ref: int | None
    """Of the reference; None without one."""
    critic: int | None
    """Of the critic; None without one."""


def data_parallel_sizes(trainer: TrainerConfig) -> DataParallelSizes:
    """Return the data-parallel size of each role that the settings build.

    Raises:
        ConfigError: parallel sizes do not divide the GPUs of a role.
    """
    place = trainer.placement
    policy_world = _world_size("policy", place.policy_num_nodes, place.policy_num_gpus_per_node)
    ref_world = _world_size("ref", place.ref_num_nodes, place.ref_num_gpus_per_node)
    critic_world = _world_size("critic", place.critic_num_nodes, place.critic_num_gpus_per_node)
    if trainer.strategy == "megatron":
        policy = megatron_data_parallel_size("policy", policy_world, trainer.policy.megatron_config)
        ref = megatron_data_parallel_size("ref", ref_world, trainer.ref.megatron_config) if uses_ref(trainer) else None
    else:
        policy = fsdp_data_parallel_size("policy", policy_world, trainer.policy.sequence_parallel_size)
        ref = (
            fsdp_data_parallel_size("ref", ref_world, trainer.ref.sequence_parallel_size) if uses_ref(trainer) else None
        )
    critic = None
    if uses_critic(trainer):
        critic = fsdp_data_parallel_size("critic", critic_world, trainer.critic.sequence_parallel_size)
    return DataParallelSizes(policy=policy, ref=ref, critic=critic)


def _world_size(role: str, num_nodes: int, num_gpus_per_node: int) -> int:
    require_positive(f"trainer.placement.{role}_num_nodes", num_nodes)
    require_positive(f"trainer.placement.{role}_num_gpus_per_node", num_gpus_per_node)
    return num_nodes * num_gpus_per_node


def uses_ref(trainer: TrainerConfig) -> bool:
    """Whether a reference model is built."""
    return trainer.algorithm.use_kl_loss or trainer.algorithm.use_kl_in_reward


def uses_critic(trainer: TrainerConfig) -> bool:
    """Whether a critic is built."""
    return trainer.critic.model.path is not None


def check_batches(trainer: TrainerConfig, num_samples: int) -> None:
    """Check that a step's ``train_batch_size * num_samples`` sequences divide among mini-batches, ranks and passes.

    Raises:
        ConfigError: a size is not positive or does not divide.
    """
    for name in ("train_batch_size", "eval_batch_size", "update_epochs_per_batch", "epochs"):
        require_positive(f"trainer.{name}", getattr(trainer, name))
    for name in ("micro_train_batch_size_per_gpu", "micro_forward_batch_size_per_gpu"):
        require_positive(f"trainer.{name}", getattr(trainer, name))
    sizes = data_parallel_sizes(trainer)
    _check_role("policy", trainer.policy_mini_batch_size, sizes.policy, trainer, num_samples)
    if sizes.critic is not None:
        _check_role("critic", trainer.critic_mini_batch_size, sizes.critic, trainer, num_samples)
    sequences = trainer.train_batch_size * num_samples
    least = math.lcm(sizes.policy, sizes.ref or 1)
    if sequences < least:
        raise ConfigError(
            f"trainer.train_batch_size={trainer.train_batch_size} x generator.n_samples_per_prompt={num_samples} = "
            f"{sequences} sequences: must be at least {least}, one for each data-parallel rank of policy"
            f"{' and reference' if sizes.ref else ''}"
        )


def _check_role(role: str, mini_batch: int, dp_size: int, trainer: TrainerConfig, num_samples: int) -> None:
    key, batch = f"trainer.{role}_mini_batch_size", trainer.train_batch_size
    require_positive(key, mini_batch)
    if mini_batch > batch:
        raise ConfigError(f"{key}={mini_batch}: must be at most trainer.train_batch_size={batch}")
    if batch % mini_batch:
        raise ConfigError(
            f"{key}={mini_batch} must divide trainer.train_batch_size={batch}; try {_near_divisors(batch, mini_batch)}"
        )
    per_gpu = mini_batch * num_samples // dp_size
    if per_gpu < 1:
        raise ConfigError(
            f"{key}={mini_batch} x generator.n_samples_per_prompt={num_samples} gives {dp_size} data-parallel ranks "
            "less than one sequence each; raise one of the two or use fewer GPUs"
        )
    micro = trainer.micro_train_batch_size_per_gpu
    if trainer.max_tokens_per_microbatch <= 0 and per_gpu % micro:
        raise ConfigError(
            f"trainer.micro_train_batch_size_per_gpu={micro} must divide the {per_gpu} sequences of a mini-batch on "
            f"one GPU of the {role} ({key}={mini_batch} x {num_samples} samples / {dp_size} ranks); "
            f"try {_near_divisors(per_gpu, micro)}"
        )
    if (batch * num_samples // dp_size) % per_gpu:
        raise ConfigError(
            f"{key}={mini_batch} x {num_samples} samples on {dp_size} ranks is {per_gpu} sequences a rank, which must "
            f"divide the {batch * num_samples // dp_size} sequences a rank of trainer.train_batch_size={batch}"
        )


def _near_divisors(number: int, near: int) -> str:
    """Name the divisors of ``number`` next below and above ``near``.

    Example:
        >>> _near_divisors(1024, 48)
        '32 or 64'
    """
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    below = [divisor for divisor in divisors if divisor < near][-1:]
    above = [divisor for divisor in divisors if divisor > near][:1]
    return " or ".join(map(str, below + above))
