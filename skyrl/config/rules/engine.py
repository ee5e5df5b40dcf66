"""Rules of engines and weight sync (`generator.inference_engine`)."""

from __future__ import annotations

from skyrl.config.derive import syncs_adapters
from skyrl.config.inference_engine import InferenceEngineConfig
from skyrl.config.legacy import ROPE_ADVICE
from skyrl.config.rules.choices import require_at_least, require_choice, require_positive
from skyrl.config.trainer import TrainerConfig
from skyrl.errors import ConfigError

_KEY = "generator.inference_engine"
_ROPE = ("rope_scaling", "rope_theta", "rope_parameters")
WEIGHT_SYNC_BACKENDS = ("auto", "nccl", "gloo", "delta", "sharded_rdt")


def check_engine(engine: InferenceEngineConfig) -> None:
    """Check the settings of engines by themselves.

    Raises:
        ConfigError: a value is out of range or contradicts another.
    """
    require_choice(f"{_KEY}.backend", engine.backend, ("vllm",))
    require_choice(f"{_KEY}.server_mode", engine.server_mode, ("auto", "embedded", "process"))
    require_choice(f"{_KEY}.weight_sync_backend", engine.weight_sync_backend, WEIGHT_SYNC_BACKENDS)
    require_choice(f"{_KEY}.weight_proof", engine.weight_proof, ("sample", "full", "off"))
    require_choice(f"{_KEY}.fp8_weight_sync_mode", engine.fp8_weight_sync_mode, (None, "blockwise", "mxfp8", "auto"))
    require_choice(f"{_KEY}.distributed_executor_backend", engine.distributed_executor_backend, ("ray", "mp"))
    for name in (
        *("num_engines", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
        *("expert_parallel_size", "max_num_batched_tokens", "max_num_seqs", "weight_transfer_threshold_cuda_ipc_GB"),
        *("cpu_kv_cache_gb", "control_timeout_s", "weight_sync_timeout_s"),
    ):
        require_positive(f"{_KEY}.{name}", getattr(engine, name))
    require_at_least(f"{_KEY}.cpu_threads", engine.cpu_threads, 1, unless=[None])
    if not 0 < engine.gpu_memory_utilization <= 1:
        raise ConfigError(f"{_KEY}.gpu_memory_utilization={engine.gpu_memory_utilization}: must be in (0, 1]")
    expert_ranks = engine.data_parallel_size * engine.tensor_parallel_size
    if engine.expert_parallel_size > 1 and engine.expert_parallel_size != expert_ranks:
        raise ConfigError(
            f"{_KEY}.expert_parallel_size={engine.expert_parallel_size}: must equal {_KEY}.data_parallel_size x "
            f"{_KEY}.tensor_parallel_size = {expert_ranks}, or be 1"
        )
    _check_disaggregation(engine)
    _check_rope(engine)


def _check_disaggregation(engine: InferenceEngineConfig) -> None:
    if engine.enable_pd and not 0 < engine.num_prefill < engine.num_engines:
        raise ConfigError(
            f"{_KEY}.num_prefill={engine.num_prefill}: with {_KEY}.enable_pd it must lie between 1 and "
            f"{_KEY}.num_engines - 1 = {engine.num_engines - 1}"
        )


def _check_rope(engine: InferenceEngineConfig) -> None:
    kwargs = engine.engine_init_kwargs or {}
    hf_overrides = kwargs.get("hf_overrides")
    nested = hf_overrides if isinstance(hf_overrides, dict) else {}
    for key, mapping, names in (("", kwargs, _ROPE), (".hf_overrides", nested, _ROPE[:2])):
        for name in names:
            if name in mapping:
                raise ConfigError(f"{_KEY}.engine_init_kwargs{key}.{name} is not read; {ROPE_ADVICE}")


def check_engine_urls(engine: InferenceEngineConfig, *, colocate_all: bool) -> None:
    """Check where engines run: started here, or at external URLs.

    Raises:
        ConfigError: URLs and placement contradict each other.
    """
    external = {
        f"{_KEY}.external_proxy_url": engine.external_proxy_url,
        f"{_KEY}.external_server_urls": engine.external_server_urls,
    }
    given = [key for key, value in external.items() if value]
    if colocate_all and given:
        raise ConfigError(f"{given[0]} needs trainer.placement.colocate_all=false: external engines have other GPUs")
    if not engine.run_engines_locally and not given:
        raise ConfigError(f"{_KEY}.run_engines_locally=false needs {' or '.join(external)}")
    for key, urls in external.items():
        for url in [urls] if isinstance(urls, str) else urls or []:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"{key}={url}: must start with http:// or https://")


def check_engine_with_trainer(engine: InferenceEngineConfig, trainer: TrainerConfig) -> None:
    """Check engines against the roles that they share GPUs and weights with.

    Raises:
        ConfigError: two settings contradict each other.
    """
    colocated = trainer.placement.colocate_all
    backend_key = f"{_KEY}.weight_sync_backend={engine.weight_sync_backend}"
    if engine.weight_sync_backend in {"delta", "sharded_rdt"} and colocated:
        raise ConfigError(f"{backend_key} needs trainer.placement.colocate_all=false")
    if engine.weight_sync_backend == "delta":
        if trainer.policy.model.lora.rank > 0:
            raise ConfigError(f"{backend_key} does not carry adapters; set trainer.policy.model.lora.rank=0")
        if engine.delta_weight_sync is None or engine.delta_weight_sync.sync_dir is None:
            raise ConfigError(f"{backend_key} needs {_KEY}.delta_weight_sync.sync_dir")
    if engine.weight_sync_backend == "gloo" and trainer.strategy == "megatron":
        raise ConfigError(f"{backend_key} does not work with trainer.strategy=megatron; use auto")
    _check_kv_offload(engine, trainer)
    _check_routes(engine, trainer)
    _check_flags(engine, trainer)


def _check_kv_offload(engine: InferenceEngineConfig, trainer: TrainerConfig) -> None:
    if not engine.offload_kv_for_weight_sync:
        return
    key = f"{_KEY}.offload_kv_for_weight_sync=true"
    if trainer.placement.colocate_all:
        raise ConfigError(f"{key} needs trainer.placement.colocate_all=false: shared engines sleep during a sync")
    if syncs_adapters(trainer):
        raise ConfigError(f"{key} does not work with trainer.policy.model.lora.rank > 0")
    if engine.weight_sync_backend == "delta":
        raise ConfigError(f"{key} does not work with {_KEY}.weight_sync_backend=delta")


def _check_routes(engine: InferenceEngineConfig, trainer: TrainerConfig) -> None:
    key, consumer = f"{_KEY}.enable_return_routed_experts", "moe_enable_routing_replay"
    megatron = trainer.policy.megatron_config
    if megatron.moe_enable_routing_replay:
        if not engine.enable_return_routed_experts:
            raise ConfigError(f"trainer.policy.megatron_config.{consumer}=true needs {key}=true")
        for role, config in (("policy", megatron), ("ref", trainer.ref.megatron_config)):
            if (config.transformer_config_kwargs or {}).get("moe_router_fusion"):
                raise ConfigError(
                    f"trainer.policy.megatron_config.{consumer}=true does not work with "
                    f"trainer.{role}.megatron_config.transformer_config_kwargs.moe_router_fusion=true"
                )
    if engine.enable_return_routed_experts:
        if engine.distributed_executor_backend != "mp":
            raise ConfigError(f"{key}=true needs {_KEY}.distributed_executor_backend=mp")
        if trainer.strategy != "megatron" or not megatron.moe_enable_routing_replay:
            raise ConfigError(f"{key}=true needs trainer.strategy=megatron and its {consumer}=true")


def _check_flags(engine: InferenceEngineConfig, trainer: TrainerConfig) -> None:
    flags = {
        "trainer.policy.language_model_only": trainer.policy.language_model_only,
        "trainer.ref.language_model_only": trainer.ref.language_model_only,
        f"{_KEY}.language_model_only": engine.language_model_only,
    }
    if len(set(flags.values())) > 1:
        raise ConfigError("; ".join(f"{key}={str(value).lower()}" for key, value in flags.items()) + ": must be equal")
    rope = ((engine.engine_init_kwargs or {}).get("hf_overrides") or {}).get("rope_parameters")
    if trainer.strategy == "megatron":
        key = "trainer.policy.megatron_config.transformer_config_kwargs"
        own = (trainer.policy.megatron_config.transformer_config_kwargs or {}).get("rope_parameters")
    else:
        key = "trainer.policy.model_config_kwargs"
        own = (trainer.policy.model_config_kwargs or {}).get("rope_parameters")
    if rope is not None and rope != own:
        raise ConfigError(
            f"{_KEY}.engine_init_kwargs.hf_overrides.rope_parameters={rope} must equal {key}.rope_parameters={own}"
        )
