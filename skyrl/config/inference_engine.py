"""Settings of the inference engines and of weight sync (`generator.inference_engine`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyrl.config.base import BaseConfig


@dataclass
class DeltaWeightSyncConfig(BaseConfig):
    """Weight sync through a store of deltas (`generator.inference_engine.delta_weight_sync`)."""

    sync_dir: str | None = None
    """Folder or bucket (``s3://``, ``gs://``) of the store; required by ``weight_sync_backend=delta``."""
    local_checkpoint_dir: str | None = None
    """Folder in which an engine rebuilds the checkpoint; None derives one from ``sync_dir``."""
    publish_staging_dir: str | None = None
    """Folder in which the trainer stages a delta; None derives one from ``sync_dir``."""
    max_file_size_in_gb: float = 1.0
    """Largest file of a delta, in GB."""
    cloud_download_workers: int = 4
    """Parallel downloads from a bucket."""
    publish_num_workers: int | None = None
    """Threads that encode a delta; None means one per CPU, 8 at most."""
    checkpoint_load_format: str = "vllm_multi_thread_safetensors"
    """Loader in the engine: ``vllm_multi_thread_safetensors`` or ``vllm_fastsafetensors``."""
    multi_thread_safetensors_max_workers: int = 8
    """Threads of the multi-threaded loader."""


@dataclass
class InferenceEngineConfig(BaseConfig):
    """Which engines run, where, and how weights reach them (`generator.inference_engine`)."""

    model_dtype: str = "bfloat16"
    """Dtype of the engine and of full-weight sync."""
    run_engines_locally: bool = True
    """Start engines; False uses those at an external URL."""
    num_engines: int = 1
    """Engines to start."""
    backend: str = "vllm"
    """Engine software; only ``vllm``."""
    server_mode: str = "auto"
    """Where the engine core runs: ``embedded`` in a thread of its server, ``process`` in processes of its own, as vLLM
    does it; ``auto`` embeds CPU engines only."""
    cpu_kv_cache_gb: float = 1.0
    """Memory for the key-value cache of a CPU engine, in GB."""
    cpu_threads: int | None = None
    """OpenMP threads of a CPU engine; None means all cores."""
    always_use_router: bool = False
    """Start a router even for a single server, which needs none."""
    weight_sync_backend: str = "auto"
    """Transport of weights: ``nccl`` (CUDA IPC where GPUs are shared), ``gloo``, ``delta`` or ``sharded_rdt`` (alias
    ``rdt``); ``auto`` means nccl with GPUs on both sides, else gloo."""
    weight_transfer_threshold_cuda_ipc_GB: float = 1.0
    """Size of one bucket of weights, in GB."""
    weight_proof: str = "sample"
    """Check after each sync that engines hold the trainer's weights: ``sample``, ``full`` or ``off``."""
    fp8_weight_sync_mode: str | None = None
    """Format of weights on the wire: None (``model_dtype``), ``blockwise``, ``mxfp8`` or ``auto``."""
    delta_weight_sync: DeltaWeightSyncConfig | None = field(default_factory=DeltaWeightSyncConfig)
    """Weight sync through a store of deltas; null means the defaults."""
    tensor_parallel_size: int = 1
    """Tensor parallelism of one engine."""
    pipeline_parallel_size: int = 1
    """Pipeline stages of one engine."""
    data_parallel_size: int = 1
    """Data-parallel replicas inside one engine."""
    expert_parallel_size: int = 1
    """Expert parallelism; above 1 it equals data times tensor parallelism."""
    vllm_v1_disable_multiproc: bool = True
    """Kept for old recipes; ``server_mode`` decides."""
    enable_prefix_caching: bool = True
    """Reuse the key-value cache of shared prefixes."""
    enable_chunked_prefill: bool = True
    """Prefill long prompts in chunks between decoding steps."""
    enable_return_routed_experts: bool = False
    """Return the experts chosen for each token."""
    enable_return_sample_support_set: bool = False
    """Return the candidates that the sampler kept for each token."""
    enable_return_sample_support_logprobs: bool = False
    """Return their log-probs too."""
    prefill_init_kwargs: dict[str, Any] | None = field(default_factory=dict)
    """Engine arguments of prefill engines only, with ``enable_pd``."""
    decode_init_kwargs: dict[str, Any] | None = field(default_factory=dict)
    """Engine arguments of decode engines only, with ``enable_pd``."""
    max_num_batched_tokens: int = 8192
    """Tokens of one engine step."""
    max_num_seqs: int = 1024
    """Sequences in one engine step."""
    enforce_eager: bool = False
    """Run without CUDA graphs and compilation."""
    fully_sharded_loras: bool = False
    """Shard adapters fully under tensor parallelism."""
    enable_ray_prometheus_stats: bool = True
    """Publish engine statistics through Ray's metrics; not built yet, so it changes nothing."""
    gpu_memory_utilization: float = 0.8
    """Share of a GPU's memory that an engine may take."""
    offload_kv_for_weight_sync: bool = False
    """Move the key-value cache to host memory during a sync; engines on GPUs of their own only."""
    use_expandable_segments: bool = False
    """Expandable segments in the engine's CUDA allocator."""
    served_model_name: str | None = None
    """Model name that the HTTP endpoint accepts; None means the policy's path."""
    distributed_executor_backend: str = "ray"
    """How one engine spans GPUs: ``ray`` or ``mp``."""
    language_model_only: bool = False
    """Leave out the vision tower; equals the policy's flag."""
    engine_init_kwargs: dict[str, Any] | None = field(default_factory=dict)
    """Further engine arguments; they win over all others."""
    speculative_config: dict[str, Any] | None = field(default_factory=dict)
    """The engine's speculative decoding; empty means off."""
    external_proxy_url: str | None = None
    """Address that serves generation, when engines run elsewhere."""
    external_server_urls: list[str] | None = None
    """Addresses of the servers to control, when engines run elsewhere."""
    enable_pd: bool = False
    """Separate engines for prefill and for decoding."""
    num_prefill: int = 0
    """Prefill engines among ``num_engines``."""
    router_init_kwargs: dict[str, Any] | None = field(default_factory=dict)
    """Further arguments of the router."""
    control_timeout_s: float = 1800.0
    """Seconds for one control call to one server."""
    weight_sync_timeout_s: float = 600.0
    """Seconds for trainer and engines to meet; each chunk has half of it."""
