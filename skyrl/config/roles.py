"""Settings of the models that train or score: policy, reference and critic (`trainer.{policy,ref,critic}`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyrl.config.base import BaseConfig
from skyrl.config.megatron import MegatronConfig


@dataclass
class OptimizerConfig(BaseConfig):
    """AdamW and its schedule (`trainer.{policy,critic}.optimizer_config`)."""

    lr: float = 1e-6
    """AdamW learning rate."""
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's decay rates of the first and second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Global L2 norm at which gradients are clipped; 0 or less, or inf, only reports the norm."""
    offload_after_step: bool = True
    """Move optimizer state to host memory after a step when roles share GPUs."""
    num_warmup_steps: int = 0
    """Optimizer steps (mini-batches) of linear warm-up."""
    scheduler: str = "constant_with_warmup"
    """Name of a ``transformers`` learning-rate schedule."""


@dataclass
class MixedPrecisionConfig(BaseConfig):
    """FSDP2's dtypes (`fsdp_config.mixed_precision`)."""

    param_dtype: str = "bf16"
    """Dtype of parameters in forward and backward passes."""
    reduce_dtype: str = "fp32"
    """Dtype in which gradients are reduced."""
    buffer_dtype: str = "fp32"
    """Dtype of buffers."""


@dataclass
class FSDPConfig(BaseConfig):
    """Sharding by FSDP2 (`trainer.{policy,ref,critic}.fsdp_config`)."""

    cpu_offload: bool = False
    """FSDP2's own offload of parameters and optimizer; replaces the offload of colocated roles."""
    reshard_after_forward: bool | int = True
    """True frees gathered parameters after the forward pass, False keeps them, a number reshards to that many ranks."""
    fsdp_size: int = -1
    """Ranks that share one copy of the parameters; -1 means all. The world size must be a multiple."""
    mixed_precision: MixedPrecisionConfig | None = field(default_factory=MixedPrecisionConfig)
    """Dtypes; null means the defaults."""
    wrap_policy: dict[str, Any] | None = field(default_factory=dict)
    """Optional ``transformer_layer_cls_to_wrap: [ClassName]``; empty means the model's own list."""


@dataclass
class SkyRLLoraConfig(BaseConfig):
    """Low-rank adapters (`<role>.model.lora`)."""

    rank: int = 0
    """Rank of the adapters; 0 trains the whole model."""
    alpha: int = 16
    """Numerator of the adapter's scale."""
    dropout: float = 0.0
    """Dropout before the adapter."""
    lora_sync_path: str = "/tmp/skyrl_lora_sync"
    """Folder through which adapters reach the engines; all nodes must see it."""
    target_modules: Any = "all-linear"
    """Modules that get an adapter: ``all-linear`` or a list of names."""
    exclude_modules: Any = None
    """Modules left out: a name, a list of names or None."""
    init_method: str = "kaiming"
    """Initialisation of the adapters; Megatron knows ``xavier``, ``normal``, ``kaiming`` and ``zero``."""
    max_loras: int = 1
    """Adapters active in the engine at one time."""
    max_cpu_loras: int | None = None
    """Adapters that the engine keeps in host memory; None means ``max_loras``, which is the least."""
    sync_mode: str = "disk"
    """``disk`` writes adapters to ``lora_sync_path``; ``memory`` ships them over the weight transport."""


@dataclass
class FakeInt4QatConfig(BaseConfig):
    """Training on the INT4 grid of frozen experts (`<role>.model.fake_int4_qat`)."""

    enabled: bool = False
    """Fake-quantise frozen expert weights; Megatron with unmerged LoRA only."""
    group_size: int = 32
    """Input elements that share a scale; equals the served checkpoint's."""
    symmetric: bool = True
    """Quantise symmetrically around zero."""
    scale_divisor: float = 7.5
    """A scale is the group's largest magnitude divided by this."""
    q_min: float = -8.0
    """Lowest code."""
    bf16_base_path: str | None = None
    """Checkpoint that the trainer loads in bf16 while engines serve ``model.path``."""


@dataclass
class ExpertMxfp8Config(BaseConfig):
    """MXFP8 experts (`<role>.model.expert_mxfp8`), Megatron only."""

    enabled: bool = False
    """Use MXFP8 for expert weights."""
    training: bool = True
    """Use it in training GEMMs."""
    rollout: bool = True
    """Use it in the engines."""
    persistent: bool = False
    """Keep the trained parameters themselves in MXFP8."""


@dataclass
class ModelConfig(BaseConfig):
    """One model (`trainer.{policy,ref,critic}.model`)."""

    path: str | None = None
    """Hub name or folder; None means the policy's for the reference, and no critic for the critic."""
    lora: SkyRLLoraConfig = field(default_factory=SkyRLLoraConfig)
    """Low-rank adapters."""
    fake_int4_qat: FakeInt4QatConfig = field(default_factory=FakeInt4QatConfig)
    """Training on the INT4 grid of frozen experts."""
    expert_mxfp8: ExpertMxfp8Config = field(default_factory=ExpertMxfp8Config)
    """MXFP8 experts."""


@dataclass
class TorchProfilerConfig(BaseConfig):
    """Traces by ``torch.profiler`` (`trainer.policy.torch_profiler_config`)."""

    enable: bool = False
    """Record traces of policy training steps."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Global policy ranks that record."""
    save_path: str | None = None
    """Local folder for the traces; required when enabled."""
    skip_first: int = 10
    """Steps before the first cycle."""
    wait: int = 0
    """Idle steps at the start of a cycle."""
    warmup: int = 1
    """Steps traced and thrown away."""
    active: int = 1
    """Steps recorded in a cycle."""
    repeat: int = 1
    """Cycles; 0 repeats to the end."""
    activities: list[str] = field(default_factory=lambda: ["cpu", "cuda"])
    """What to trace: ``cpu``, ``cuda`` or both."""
    record_shapes: bool = True
    """Record operand shapes."""
    profile_memory: bool = False
    """Record allocations."""
    with_stack: bool = True
    """Record source lines."""
    with_flops: bool = False
    """Estimate FLOPs."""
    with_modules: bool = False
    """Record the module hierarchy."""
    export_type: str = "chrome_trace"
    """``chrome_trace``, or ``stacks`` (needs ``with_stack``)."""


@dataclass
class PolicyConfig(BaseConfig):
    """The model that learns (`trainer.policy`)."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(path="Qwen/Qwen2.5-1.5B-Instruct"))
    """The model."""
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and schedule."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding under ``trainer.strategy=fsdp``."""
    megatron_config: MegatronConfig = field(default_factory=MegatronConfig)
    """Layout under ``trainer.strategy=megatron``."""
    torch_profiler_config: TorchProfilerConfig = field(default_factory=TorchProfilerConfig)
    """Traces of training steps."""
    sequence_parallel_size: int = 1
    """Ulysses sequence parallelism under FSDP; Megatron needs 1."""
    use_torch_compile: bool = False
    """Compile the step from logits to log-probs."""
    record_memory: bool = False
    """Write CUDA memory snapshots under ``{ckpt_path}/memory_snapshots/``."""
    model_config_kwargs: dict[str, Any] | None = field(default_factory=dict)
    """Overrides of the Hugging Face model config."""
    language_model_only: bool = False
    """Leave out the vision tower; equals the engine's and the reference's flag."""
    inference_only_init: bool = False
    """Build no optimizer: only forward passes and weight sync are allowed."""


@dataclass
class RefConfig(BaseConfig):
    """The frozen reference (`trainer.ref`), built only when a KL term asks for it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model; its path defaults to the policy's."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding under ``trainer.strategy=fsdp``."""
    megatron_config: MegatronConfig = field(default_factory=MegatronConfig)
    """Layout under ``trainer.strategy=megatron``."""
    sequence_parallel_size: int = 1
    """Ulysses sequence parallelism under FSDP; Megatron needs 1."""
    model_config_kwargs: dict[str, Any] | None = field(default_factory=dict)
    """Overrides of the Hugging Face model config."""
    language_model_only: bool = False
    """Leave out the vision tower; equals the policy's flag."""


@dataclass
class CriticConfig(BaseConfig):
    """The value model (`trainer.critic`), built only when its model has a path."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model; no path means no critic."""
    optimizer_config: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=5e-6))
    """Optimizer and schedule."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding."""
    sequence_parallel_size: int = 1
    """Ulysses sequence parallelism."""
    model_config_kwargs: dict[str, Any] | None = field(default_factory=dict)
    """Overrides of the Hugging Face model config."""
