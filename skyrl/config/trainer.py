"""Settings of the training loop (`trainer`)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from skyrl.config.algorithm import AlgorithmConfig
from skyrl.config.base import BaseConfig
from skyrl.config.roles import CriticConfig, PolicyConfig, RefConfig


@dataclass
class PlacementConfig(BaseConfig):
    """Which GPUs, or processes on a machine without GPUs, each role gets (`trainer.placement`)."""

    colocate_all: bool = True
    """Policy, reference, critic and engines share the same GPUs."""
    colocate_policy_ref: bool = True
    """Without ``colocate_all``: policy and reference share their GPUs."""
    policy_num_nodes: int = 1
    """Nodes of the policy."""
    policy_num_gpus_per_node: int = 1
    """GPUs of the policy on each node; processes where there is no GPU."""
    ref_num_nodes: int = 1
    """Nodes of the reference."""
    ref_num_gpus_per_node: int = 1
    """GPUs of the reference on each node."""
    critic_num_nodes: int = 1
    """Nodes of the critic."""
    critic_num_gpus_per_node: int = 1
    """GPUs of the critic on each node."""


@dataclass
class MTPConfig(BaseConfig):
    """Draft heads (`trainer.mtp`)."""

    enabled: bool = False
    """Train draft heads and decode speculatively with them; Megatron only."""
    num_speculative_tokens: int = 1
    """Tokens drafted at a time."""
    loss_weight: float = 0.1
    """Weight of the draft loss."""


@dataclass
class FullyAsyncConfig(BaseConfig):
    """Training while generation goes on (`trainer.fully_async`)."""

    enabled: bool = False
    """Tells generation that training is asynchronous."""
    max_staleness_steps: int = 4
    """A group scheduled at step i may train at step i plus this at the latest."""
    num_parallel_generation_workers: int = 768
    """Groups under way at one time."""
    sample_full_batch: bool = False
    """Go on sampling until the batch is full of groups that teach something; needs ``zero_variance_filter``."""
    clear_kv_cache_on_weight_sync: bool = False
    """Drop cached keys and values of running requests at a sync."""
    simulate_training: bool = False
    """Load no models for training and wait instead."""
    simulate_training_step_seconds: float = 30.0
    """Seconds of a simulated step."""
    simulate_weight_sync_seconds: float = 0.0
    """Seconds of a simulated sync."""


@dataclass
class TrainerConfig(BaseConfig):
    """The training loop: roles, batches, checkpoints and logs (`trainer`)."""

    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """Which GPUs or processes each role gets."""
    strategy: str = "fsdp"
    """Training backend: ``fsdp`` or ``megatron``."""
    sequence_parallel_backend: str = "ulysses"
    """Sequence parallelism under FSDP; only ``ulysses``."""
    use_expandable_segments: bool = True
    """Expandable segments in the CUDA allocator of training workers."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass."""
    gradient_checkpointing_use_reentrant: bool = False
    """Use torch's older, reentrant recomputation."""
    bf16: bool = True
    """Compute in bf16; False computes in fp32."""
    flash_attn: bool = True
    """Use flash attention where it is available."""
    seed: int = 42
    """Seed of data order, sampling, dropout and torch; a worker adds its rank."""
    disable_fast_tokenizer: bool = False
    """Use the tokenizer's slow implementation."""
    cpu_threads: int | None = None
    """Torch threads of a training process without a GPU; None shares the cores among the role's processes."""
    worker_timeout_s: float = 7200.0
    """Seconds for one call to a group of training workers."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """The model that learns."""
    ref: RefConfig = field(default_factory=RefConfig)
    """The frozen reference."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value model."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """The learning rule."""
    mtp: MTPConfig = field(default_factory=MTPConfig)
    """Draft heads."""
    fully_async: FullyAsyncConfig = field(default_factory=FullyAsyncConfig)
    """Training while generation goes on."""

    epochs: int = 1
    """Passes over the training prompts."""
    max_training_steps: int | None = None
    """Steps after which the run ends; None means all epochs."""
    update_epochs_per_batch: int = 1
    """Passes over one batch of rollouts."""
    train_batch_size: int = 1024
    """Prompts of one step."""
    policy_mini_batch_size: int = 256
    """Prompts of one optimizer step of the policy."""
    critic_mini_batch_size: int = 256
    """Prompts of one optimizer step of the critic."""
    micro_train_batch_size_per_gpu: int = 1
    """Sequences of one forward and backward pass."""
    micro_forward_batch_size_per_gpu: int = 1
    """Sequences of one forward pass without gradients."""
    max_tokens_per_microbatch: int = -1
    """Tokens of one micro-batch, instead of a number of sequences; -1 counts sequences."""
    recompute_old_logprobs_per_minibatch: bool = True
    """Compute old log-probs, reference log-probs and values in the layout of the training mini-batches."""
    remove_microbatch_padding: bool = True
    """Pack sequences without padding."""
    update_ref_every_epoch: bool = False
    """Copy the policy into the reference after each epoch."""
    max_prompt_length: int = 512
    """Most tokens of a prompt; longer ones are dropped when data is loaded."""
    logprobs_chunk_size: int | None = 1024
    """Tokens of one chunk of the log-prob computation; None (no chunks) is for Megatron only."""
    vocab_entropy_chunk_size: int | None = 0
    """Tokens of one chunk of the entropy on Megatron: 0 picks it, None means no chunks."""
    vocab_entropy_chunk_memory_mb: int = 512
    """Memory for one chunk that ``vocab_entropy_chunk_size=0`` may take, in MB."""
    fused_lm_head_logprob: bool = False
    """Compute log-probs without storing all logits; Megatron only."""
    fused_lm_head_logprob_backend: str = "torch"
    """Implementation of that: ``torch`` or ``triton``."""

    eval_batch_size: int = 1024
    """Prompts evaluated at a time."""
    eval_before_train: bool = True
    """Evaluate before the first step."""
    eval_interval: int = 5
    """Steps between evaluations; 0 or less turns them off."""
    resume_mode: str | None = "latest"
    """Where to go on: ``none``, the ``latest`` checkpoint of ``ckpt_path``, or ``from_path``."""
    resume_path: str | None = None
    """Checkpoint for ``resume_mode=from_path``."""
    ckpt_path: str = field(default_factory=lambda: os.path.expanduser("~/ckpts/"))
    """Folder or bucket (``s3://``, ``gs://``, ``gcs://``) of the checkpoints."""
    ckpt_interval: int = 10
    """Steps between checkpoints; 0 or less turns them off."""
    max_ckpts_to_keep: int = -1
    """Checkpoints kept, the last ones; -1 keeps all."""
    export_path: str = field(default_factory=lambda: os.path.expanduser("~/exports/"))
    """Folder or bucket of Hugging Face exports and dumps."""
    hf_save_interval: int = -1
    """Steps between Hugging Face exports; 0 or less turns them off."""
    run_dir: str = ""
    """Local folder of metrics, trajectories and plots; empty means ``runs/<run_name>`` under ``export_path``, or under
    ``log_path`` when exports go to a bucket."""
    log_path: str = "/tmp/skyrl-logs"
    """Folder of the logs of workers and engines."""
    project_name: str = "skyrl"
    """Project under which trackers file the run."""
    run_name: str = "test_run"
    """Name of the run."""
    logger: Any = "console"
    """Tracker or list of trackers: ``console``, ``tensorboard``, ``wandb``, ``mlflow``, ``swanlab``, ``trackio``."""
    tags: list[str] | None = None
    """Tags of the run; W&B only."""
    enable_ray_gpu_monitor: bool = True
    """Report GPU use as ``ray/*`` metrics."""
    dump_data_batch: bool = False
    """Write each training batch under ``{export_path}/dumped_data/``."""
    dump_eval_results: bool = True
    """Write evaluation results under ``{export_path}/dumped_evals/``."""
    print_example_interval: int = 1
    """Steps between printed examples; 0 or less turns them off."""
    log_example_interval: int = -1
    """Old name of ``print_example_interval``; above 0 it wins."""
    num_logger_eval_samples: int = -1
    """Rows of the evaluation table sent to trackers; 0 or less turns it off."""
    num_logger_train_samples: int = -1
    """Rows of the training table sent to trackers; 0 or less turns it off."""
