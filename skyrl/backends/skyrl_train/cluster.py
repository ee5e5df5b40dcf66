"""Start or join a Ray cluster, with the environment that workers need.

`initialize_ray` is called once by the process that launches a run. What users registered there (losses, advantage
estimators) travels in a worker-process setup hook, so every worker knows it before its first task.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import ray
from ray._private import ray_constants

from skyrl.backends.skyrl_train import device
from skyrl.backends.skyrl_train.placement import cpu_processes, gpu_demands, require_cpus, require_gpus
from skyrl.config.root import SkyRLTrainConfig
from skyrl.env_vars import SKYRL_DUMP_INFRA_LOG_TO_STDOUT, SKYRL_LD_LIBRARY_PATH_EXPORT, SKYRL_PYTHONPATH_EXPORT

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
LOG_FILE_VARIABLE = "SKYRL_LOG_FILE"
RAY_BYTECODE_VARIABLE = "PYTHONDONTWRITEBYTECODE"

# Set in the driver, wanted by every worker.
_FORWARDED = frozenset(
    (
        "LOG_LEVEL",
        "HF_HOME",
        "HF_HUB_OFFLINE",
        "HF_TOKEN",
        "TRANSFORMERS_OFFLINE",
        "TOKENIZERS_PARALLELISM",
        "WANDB_API_KEY",
        "WANDB_MODE",
        "MLFLOW_TRACKING_URI",
        "MLFLOW_TRACKING_TOKEN",
        "SWANLAB_API_KEY",
        "SWANLAB_LOG_DIR",
        "SWANLAB_MODE",
        "TENSORBOARD_DIR",
        "DAYTONA_API_KEY",
        "MODAL_TOKEN_ID",
        "MODAL_TOKEN_SECRET",
        "UV_PROJECT_ENVIRONMENT",
        "UV_CACHE_DIR",
        "UV_LINK_MODE",
        "UV_PYTHON",
        "UV_OFFLINE",
        "PYTORCH_CUDA_ALLOC_CONF",
        "CUDA_LAUNCH_BLOCKING",
        "PYTHONFAULTHANDLER",
        "TORCH_SHOW_CPP_STACKTRACES",
        "TORCH_USE_CUDA_DSA",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST",
        "NCCL_DEBUG",
        "NCCL_NET_PLUGIN",
        "NCCL_NVLS_ENABLE",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        "RAY_CGRAPH_get_timeout",
    )
)


def cluster_device_type() -> str:
    """``cuda`` if the Ray cluster has GPUs, else ``cpu``. Needs a running Ray."""
    return "cuda" if ray.cluster_resources().get("GPU") else "cpu"


def is_single_node() -> bool:
    """Whether the Ray cluster has one node; nothing then listens outside of it. Needs a running Ray."""
    return sum(bool(node["Alive"]) for node in ray.nodes()) <= 1


def get_node_ip() -> str:
    """Address under which the whole cluster reaches this node: the loopback where there is one node only."""
    if not ray.is_initialized() or is_single_node():
        return LOOPBACK
    return str(ray.util.get_node_ip_address()).strip("[]")


def prepare_runtime_environment(cfg: SkyRLTrainConfig) -> dict[str, str]:
    """Environment variables that every worker of the run gets (config.md 8)."""
    env = {name: value for name, value in os.environ.items() if name in _FORWARDED or name.startswith("SKYRL_")}
    if cfg.generator.inference_engine.weight_sync_backend in {"nccl", "auto"}:
        env["NCCL_CUMEM_ENABLE"] = "0"
    if cfg.trainer.strategy == "megatron":
        env["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        env["FLA_TILELANG"] = os.environ.get("FLA_TILELANG", "1")
        if cfg.trainer.flash_attn:
            env["NVTE_FUSED_ATTN"] = "0"
    if cfg.generator.inference_engine.backend == "vllm":
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "true"
        env["VLLM_DISABLE_COMPILE_CACHE"] = "1"
    if _has_local_gpus() and not device.peer_access_possible(_widest_group(cfg)):
        logger.info("These GPUs cannot read each other's memory: NCCL goes through host memory")
        env |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    for wanted, name in ((SKYRL_LD_LIBRARY_PATH_EXPORT, "LD_LIBRARY_PATH"), (SKYRL_PYTHONPATH_EXPORT, "PYTHONPATH")):
        if wanted and name in os.environ:
            env[name] = os.environ[name]
    return env


def _has_local_gpus() -> bool:
    return Path("/dev/nvidiactl").exists()


def _widest_group(cfg: SkyRLTrainConfig) -> int:
    return max(cfg.trainer.placement.policy_num_gpus_per_node, cfg.generator.inference_engine.tensor_parallel_size)


def initialize_ray(cfg: SkyRLTrainConfig, *, trains: bool = True) -> None:
    """Start Ray on this machine, or join the cluster of ``RAY_ADDRESS`` or of a `ray start` on this node.

    In a process that is connected already, Ray is left as it is. A cluster of one's own listens on the loopback
    address only and has no dashboard.

    Args:
        cfg: The run.
        trains: Whether it starts training roles beside the engines.

    Raises:
        ResourceError: The run asks for more GPUs or processes than the cluster has.
        ConfigError: A registered function cannot travel.
    """
    if not ray.is_initialized():
        _init(cfg)
    require_resources(cfg, trains=trains)


def _init(cfg: SkyRLTrainConfig) -> None:
    os.environ.pop(RAY_BYTECODE_VARIABLE, None)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if not SKYRL_DUMP_INFRA_LOG_TO_STDOUT:
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        os.environ[LOG_FILE_VARIABLE] = str(_new_log_file(cfg.trainer.log_path))
    runtime_env = {
        "env_vars": prepare_runtime_environment(cfg),
        "worker_process_setup_hook": _worker_setup_hook(),
    }
    address = _cluster_address()
    if address is not None:
        ray.init(address=address, runtime_env=runtime_env, log_to_driver=True)
        return
    with _on_loopback():
        ray.init(address="local", runtime_env=runtime_env, log_to_driver=True, include_dashboard=False)


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Let a cluster that starts inside the block use the loopback address on all its sockets.

    Ray resolves a loopback `_node_ip_address` to the outward address, except where it takes a cluster of several nodes
    to be impossible; the variable says so to the processes that it starts.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        del os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR]
        ray_constants.ENABLE_RAY_CLUSTER = before


def require_resources(cfg: SkyRLTrainConfig, *, trains: bool = True) -> None:
    """Compare what the run asks for with what the connected cluster has.

    Raises:
        ResourceError: It asks for more.
    """
    resources = ray.cluster_resources()
    if resources.get("GPU"):
        by_node = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
        require_gpus(gpu_demands(cfg, trains=trains), by_node)
        return
    require_cpus(cpu_processes(cfg, trains=trains), resources.get("CPU", 0.0))


def _cluster_address() -> str | None:
    """Address of a cluster to join; None to start one."""
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    marker = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"  # `ray start` writes it
    with contextlib.suppress(OSError):
        return marker.read_text().strip() or None
    return None


def _new_log_file(log_path: str) -> Path:
    folder = Path(log_path).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"infra-{datetime.datetime.now():%y%m%d_%H%M%S}.log"


def _exported_user_functions() -> dict[str, dict[str, bytes]]:
    """What users registered; without the algorithms loaded nobody can have registered anything."""
    if "skyrl.algorithms.registries" not in sys.modules and "skyrl.algorithms" not in sys.modules:
        return {}
    from skyrl.algorithms.registries import export_user_functions

    return {kind: entries for kind, entries in export_user_functions().items() if entries}


def import_user_functions(exported: Mapping[str, Mapping[str, bytes]]) -> None:
    """Make what another process of this run registered known in this one; loads nothing when that is nothing."""
    entries = {kind: dict(functions) for kind, functions in exported.items() if functions}
    if entries:
        from skyrl.algorithms import registries

        registries.import_user_functions(entries)


def _worker_setup_hook() -> Callable[[], None]:
    """What every new worker process runs; a plain function, because Ray exports it under its name."""
    user_functions = _exported_user_functions()

    def set_up() -> None:
        set_up_worker_process(user_functions)

    return set_up


def set_up_worker_process(user_functions: Mapping[str, Mapping[str, bytes]]) -> None:
    """Prepare a new Ray worker: cache bytecode, know the user's functions."""
    os.environ.pop(RAY_BYTECODE_VARIABLE, None)
    sys.dont_write_bytecode = False
    import_user_functions(user_functions)


def redirect_actor_output_to_file() -> None:
    """Send this process's stdout and stderr, C libraries included, to the run's infra log.

    Actors of training and inference call it at their start, so that the terminal belongs to the trainer. It does
    nothing with SKYRL_DUMP_INFRA_LOG_TO_STDOUT=1 or outside a run.
    """
    target = os.environ.get(LOG_FILE_VARIABLE)
    if not target or SKYRL_DUMP_INFRA_LOG_TO_STDOUT:
        return
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
