"""Settings of the Megatron backend (`trainer.{policy,ref}.megatron_config`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyrl.config.base import BaseConfig

DEFAULT_OPTIMIZER_KWARGS: dict[str, Any] = {
    "overlap_cpu_optimizer_d2h_h2d": False,
    "use_precision_aware_optimizer": False,
    "optimizer_cpu_offload": False,
    "optimizer_offload_fraction": 0.0,
}
DEFAULT_TRANSFORMER_KWARGS: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_modules": ["core_attn"],
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "gradient_accumulation_fusion": False,
}


@dataclass
class MegatronDDPConfig(BaseConfig):
    """Data-parallel gradient and parameter traffic (`megatron_config.ddp_config`)."""

    grad_reduce_in_fp32: bool = True
    """Reduce gradients in fp32."""
    overlap_grad_reduce: bool = False
    """Overlap the gradient reduction with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the parameter all-gather with the forward pass."""
    average_in_collective: bool = True
    """Average inside the collective instead of scaling before it."""
    fp8_param_gather: bool = False
    """Gather parameters in FP8; required by ``fp8_param`` and by persistent expert MXFP8."""
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    """Gather MXFP8 parameters through the gradient buffer; set by persistent expert MXFP8."""


@dataclass
class MegatronHFExportConfig(BaseConfig):
    """Hugging Face export (`megatron_config.hf_export_config`)."""

    distributed_save: bool = False
    """Let every writer take part in an export; needs a file system that all nodes share."""
    save_every_n_ranks: int = 1
    """Ranks 0, N, 2N, ... write."""


@dataclass
class MegatronLoraConfig(BaseConfig):
    """LoRA on Megatron (`megatron_config.lora_config`)."""

    lora_type: str = "lora"
    """``lora``, or ``canonical_lora`` with one adapter for each of q, k, v, gate and up."""
    merge_lora: bool = True
    """Merge adapters into the base for weight sync; False sends the adapter alone."""
    normalize_moe_lora: bool = False
    """Give expert adapters rank / router top-k, which must divide."""


@dataclass
class MegatronConfig(BaseConfig):
    """Parallel layout and model options of the Megatron backend."""

    tensor_model_parallel_size: int = 1
    """Tensor parallelism; above 1 also turns on Megatron's sequence parallelism."""
    pipeline_model_parallel_size: int = 1
    """Pipeline stages."""
    context_parallel_size: int = 1
    """Context parallelism; above 1 needs ``trainer.remove_microbatch_padding``."""
    expert_model_parallel_size: int = 1
    """Expert parallelism."""
    expert_tensor_parallel_size: int | None = None
    """Tensor parallelism inside an expert; None means that of the model."""
    moe_token_dispatcher_type: str = "alltoall"
    """How tokens travel to their experts."""
    moe_router_load_balancing_type: str = "none"
    """Auxiliary balancing loss: ``none``, ``aux_loss``, ``seq_aux_loss`` or ``global_aux_loss``."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of the balancing loss; 0 turns it off."""
    moe_grouped_gemm: bool = True
    """Multiply all experts of a rank in one grouped GEMM."""
    moe_router_score_function: str | None = None
    """Score function of the router; None means the model's."""
    moe_router_enable_expert_bias: bool | None = None
    """Expert bias of the router; None means the model's."""
    moe_enable_routing_replay: bool = False
    """Route training tokens to the experts that the engine chose."""
    moe_per_layer_logging: bool = False
    """Report the balancing loss of each layer."""
    moe_router_dtype: str = "fp32"
    """Router precision: ``fp32`` or ``fp64``."""
    ddp_config: MegatronDDPConfig = field(default_factory=MegatronDDPConfig)
    """Data-parallel gradient and parameter traffic."""
    hf_export_config: MegatronHFExportConfig = field(default_factory=MegatronHFExportConfig)
    """Hugging Face export."""
    lora_config: MegatronLoraConfig = field(default_factory=MegatronLoraConfig)
    """LoRA on Megatron."""
    fp8: str | None = None
    """FP8 GEMM format: ``e4m3`` or ``hybrid``; None means no FP8."""
    fp8_recipe: str | None = None
    """FP8 scaling: ``auto``, ``blockwise``, ``mxfp8`` or ``delayed``."""
    fp8_param: bool | None = None
    """Keep primary parameters in FP8; blockwise scaling only, with ``ddp_config.fp8_param_gather``."""
    fp8_amax_compute_algo: str | None = None
    """Statistic behind delayed scaling: ``most_recent`` or ``max``."""
    optimizer_config_kwargs: dict[str, Any] | None = field(default_factory=lambda: dict(DEFAULT_OPTIMIZER_KWARGS))
    """Overrides of Megatron's optimizer config; ``*_dtype`` values are dtype names. null means the defaults."""
    transformer_config_kwargs: dict[str, Any] | None = field(
        default_factory=lambda: {**DEFAULT_TRANSFORMER_KWARGS, "recompute_modules": ["core_attn"]}
    )
    """Overrides of Megatron's transformer config, such as recomputation and rope. null means the defaults."""
    empty_cuda_cache: bool | None = True
    """Free cached blocks between the backward pass and the optimizer step."""
    model_config_kwargs: dict[str, Any] | None = field(default_factory=dict)
    """Model overrides for conversion; only the entry ``model_config`` is read."""
    dist_ckpt_optim_fully_reshardable: bool = False
    """Save optimizer state so that any parallel layout can load it, not only another data-parallel size."""
    freeze_moe_router: bool = False
    """Do not train the router; nothing on dense models."""
    mtp_num_layers: int | None = None
    """Draft heads: None means the model's own number, 0 none."""
    mtp_loss_weight: float = 0.1
    """Weight of the draft loss."""
    mtp_loss_chunk_size: int | None = 1024
    """Tokens of one chunk of the draft loss; None means no chunks."""
    mtp_loss_topk: int | None = None
    """Distil only the teacher's top-k tokens, renormalised; None means all."""
    async_dist_ckpt_save: bool = False
    """Write checkpoints in the background; not for cloud paths."""
    async_dist_ckpt_strategy: str = "mcore"
    """Background writer: ``mcore`` or ``nvrx``."""
    async_save_prestage_to_cpu: bool = False
    """Copy shards to host memory first, for hosts that refuse ptrace."""
