"""Rules of the training loop (`trainer`) and of the data loader."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

from skyrl.config.data import DataConfig
from skyrl.config.roles import FSDPConfig, OptimizerConfig, TorchProfilerConfig
from skyrl.config.rules.batches import uses_critic, uses_ref
from skyrl.config.rules.choices import require_at_least, require_choice, require_positive
from skyrl.config.trainer import TrainerConfig
from skyrl.errors import ConfigError
from skyrl.utils.storage import is_cloud_path

LOGGERS = ("console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio")
_SCHEDULERS = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"),
    *("reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"),
)
_DTYPES = ("bf16", "fp16", "fp32")


def check_trainer(trainer: TrainerConfig) -> None:
    """Check strategy, optimizers, lengths and checkpoints.

    Raises:
        ConfigError: a value is out of range or contradicts another.
    """
    require_choice("trainer.strategy", trainer.strategy, ("fsdp", "megatron"))
    require_choice("trainer.sequence_parallel_backend", trainer.sequence_parallel_backend, ("ulysses",))
    require_at_least("trainer.max_training_steps", trainer.max_training_steps, 1, unless=[None])
    require_at_least("trainer.cpu_threads", trainer.cpu_threads, 1, unless=[None])
    require_at_least("trainer.seed", trainer.seed, 0)
    require_positive("trainer.worker_timeout_s", trainer.worker_timeout_s)
    if trainer.policy.model.path is None:
        raise ConfigError("trainer.policy.model.path=null: must name the model to train")
    _check_optimizer("policy", trainer.policy.optimizer_config)
    _check_fsdp("policy", trainer.policy.fsdp_config)
    if uses_critic(trainer):
        _check_optimizer("critic", trainer.critic.optimizer_config)
        _check_fsdp("critic", trainer.critic.fsdp_config)
    if uses_ref(trainer):
        _check_fsdp("ref", trainer.ref.fsdp_config)
    if trainer.strategy == "megatron" and uses_critic(trainer):
        raise ConfigError("trainer.critic.model.path needs trainer.strategy=fsdp: Megatron trains no critic")
    _check_chunks(trainer)
    _check_checkpoints(trainer)
    _check_profiler(trainer.policy.torch_profiler_config)


def _check_optimizer(role: str, optimizer: OptimizerConfig) -> None:
    key = f"trainer.{role}.optimizer_config"
    require_at_least(f"{key}.lr", optimizer.lr, 0)
    require_at_least(f"{key}.weight_decay", optimizer.weight_decay, 0)
    require_at_least(f"{key}.num_warmup_steps", optimizer.num_warmup_steps, 0)
    require_choice(f"{key}.scheduler", optimizer.scheduler, _SCHEDULERS)
    betas = optimizer.adam_betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"{key}.adam_betas={betas}: must be two numbers from 0 to below 1")


def _check_fsdp(role: str, fsdp: FSDPConfig) -> None:
    key = f"trainer.{role}.fsdp_config"
    require_at_least(f"{key}.fsdp_size", fsdp.fsdp_size, 1, unless=[-1])
    if not isinstance(fsdp.reshard_after_forward, bool):
        require_at_least(f"{key}.reshard_after_forward", fsdp.reshard_after_forward, 1)
    if fsdp.mixed_precision is not None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            require_choice(f"{key}.mixed_precision.{name}", getattr(fsdp.mixed_precision, name), _DTYPES)


def _check_chunks(trainer: TrainerConfig) -> None:
    require_at_least("trainer.logprobs_chunk_size", trainer.logprobs_chunk_size, 1, unless=[None])
    if trainer.logprobs_chunk_size is None and trainer.strategy != "megatron":
        raise ConfigError("trainer.logprobs_chunk_size=null needs trainer.strategy=megatron; give a number of tokens")
    require_at_least("trainer.vocab_entropy_chunk_size", trainer.vocab_entropy_chunk_size, 0, unless=[None])
    require_positive("trainer.vocab_entropy_chunk_memory_mb", trainer.vocab_entropy_chunk_memory_mb)
    if trainer.fused_lm_head_logprob and trainer.strategy != "megatron":
        raise ConfigError("trainer.fused_lm_head_logprob=true needs trainer.strategy=megatron")


def _check_checkpoints(trainer: TrainerConfig) -> None:
    if trainer.max_ckpts_to_keep == 0:
        raise ConfigError("trainer.max_ckpts_to_keep=0: must be -1 (keep all) or a positive number")
    require_at_least("trainer.max_ckpts_to_keep", trainer.max_ckpts_to_keep, 1, unless=[-1])
    require_choice("trainer.resume_mode", trainer.resume_mode, (None, "none", "latest", "from_path"))
    if trainer.resume_mode == "from_path" and not trainer.resume_path:
        raise ConfigError("trainer.resume_mode=from_path needs trainer.resume_path, the folder of a checkpoint")
    if not trainer.run_name:
        raise ConfigError("trainer.run_name= must not be empty")
    if trainer.run_dir is not None and is_cloud_path(trainer.run_dir):
        raise ConfigError(f"trainer.run_dir={trainer.run_dir}: must be a local folder")


def _check_profiler(profiler: TorchProfilerConfig) -> None:
    if not profiler.enable:
        return
    key = "trainer.policy.torch_profiler_config"
    if not profiler.ranks:
        raise ConfigError(f"{key}.ranks=[]: must name at least one rank")
    if not profiler.save_path or is_cloud_path(profiler.save_path):
        raise ConfigError(f"{key}.save_path={profiler.save_path}: must be a local folder")
    for name in ("skip_first", "wait", "warmup", "repeat"):
        require_at_least(f"{key}.{name}", getattr(profiler, name), 0)
    require_at_least(f"{key}.active", profiler.active, 1)
    if not profiler.activities or not {item.lower() for item in profiler.activities} <= {"cpu", "cuda"}:
        raise ConfigError(f"{key}.activities={profiler.activities}: must hold cpu, cuda or both")
    require_choice(f"{key}.export_type", profiler.export_type, ("chrome_trace", "stacks"))
    if profiler.export_type == "stacks" and not profiler.with_stack:
        raise ConfigError(f"{key}.export_type=stacks needs {key}.with_stack=true")


def check_async(trainer: TrainerConfig) -> None:
    """Check training while generation goes on, when it is enabled.

    Raises:
        ConfigError: the number of workers does not fit batch size and staleness.
    """
    options, key = trainer.fully_async, "trainer.fully_async"
    if not options.enabled:
        return
    require_at_least(f"{key}.max_staleness_steps", options.max_staleness_steps, 0)
    least = trainer.policy_mini_batch_size
    most = least * (options.max_staleness_steps + 1)
    if not least <= options.num_parallel_generation_workers <= most:
        raise ConfigError(
            f"{key}.num_parallel_generation_workers={options.num_parallel_generation_workers}: must lie between "
            f"trainer.policy_mini_batch_size={least} and that times {key}.max_staleness_steps + 1, {most}"
        )
    if options.sample_full_batch and not trainer.algorithm.zero_variance_filter:
        raise ConfigError(f"{key}.sample_full_batch=true needs trainer.algorithm.zero_variance_filter=true")


def check_draft_heads(trainer: TrainerConfig) -> None:
    """Check draft heads, when they are enabled.

    Raises:
        ConfigError: the model has no draft heads, or none are drafted.
    """
    if not trainer.mtp.enabled:
        return
    require_at_least("trainer.mtp.num_speculative_tokens", trainer.mtp.num_speculative_tokens, 1)
    if trainer.policy.megatron_config.mtp_num_layers == 0:
        raise ConfigError(
            "trainer.mtp.enabled=true needs trainer.policy.megatron_config.mtp_num_layers above 0 or null"
        )


def check_data(data: DataConfig) -> None:
    """Check the data loader's settings.

    Raises:
        ConfigError: there is nothing to train on, or the loader's options contradict each other.
    """
    if not data.train_data:
        raise ConfigError("data.train_data=[]: must name at least one file or data set")
    workers = data.dataloader.num_workers
    require_at_least("data.dataloader.num_workers", workers, 0, unless=[None])
    if data.dataloader.persistent_workers and workers == 0:
        raise ConfigError("data.dataloader.persistent_workers=true needs data.dataloader.num_workers above 0")


def check_loggers(loggers: object, environ: Mapping[str, str] = os.environ) -> None:
    """Check the trackers' names, that their packages are installed, and that W&B can log in.

    Raises:
        ConfigError: a tracker is unknown, its package or ``WANDB_API_KEY`` is missing.
    """
    names = [loggers] if isinstance(loggers, str) else loggers
    if not isinstance(names, list | tuple):
        raise ConfigError(f"trainer.logger={loggers}: must be a name or a list of names from {', '.join(LOGGERS)}")
    for name in names:
        require_choice("trainer.logger", name, LOGGERS)
        if name != "console" and not _is_installed(name):
            raise ConfigError(
                f"trainer.logger={name} needs the package {name!r}, which is not installed: pip install {name}, "
                "or use trainer.logger=console"
            )
    offline = environ.get("WANDB_MODE", "") in {"offline", "disabled", "dryrun"}
    if "wandb" in names and not environ.get("WANDB_API_KEY") and not offline:
        raise ConfigError(
            "trainer.logger=wandb needs the environment variable WANDB_API_KEY; set it, or use trainer.logger=console"
        )


def _is_installed(package: str) -> bool:
    """Look for a package without importing it; a mere folder of its name, such as the runs in ``./wandb``, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
