"""What every training actor is: one rank of a torch process group with a config and a model.

The backend's workers (`fsdp.fsdp_worker`) derive from `Worker`. An actor stays thin: losses are in `policy`, metrics
in `metrics`, sharding and files in `distributed.fsdp`.
"""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Mapping
from typing import Any

import ray
import torch
import torch.distributed as dist

from skyrl.backends.skyrl_train import cluster, device
from skyrl.backends.skyrl_train.distributed.dispatch import MeshRank
from skyrl.config.trainer import TrainerConfig
from skyrl.env_vars import SKYRL_WORKER_NCCL_TIMEOUT_IN_S

logger = logging.getLogger(__name__)


class DistributedTorchRayActor:
    """A process of a torch process group.

    Args:
        world_size: Ranks in the group.
        rank: This one's number.
        local_rank: Number on its node.
        master_addr: Address of rank 0; None on rank 0, which opens the store that the others join.
        master_port: Its port.
        sequence_parallel_size: Ranks that share a sequence.
        record_memory: Record GPU allocations for `save_memory_snapshot`.
        cpu_threads: Torch threads of a process without a GPU.
        user_functions: What users registered before the group was built.
    """

    def __init__(  # noqa: PLR0913 (upstream's signature)
        self,
        world_size: int,
        rank: int,
        local_rank: int,
        master_addr: str | None = None,
        master_port: int | None = None,
        sequence_parallel_size: int = 1,
        record_memory: bool = False,
        *,
        cpu_threads: int | None = None,
        user_functions: Mapping[str, Mapping[str, bytes]] | None = None,
    ) -> None:
        cluster.redirect_actor_output_to_file()
        logging.basicConfig(level=os.environ.get("LOG_LEVEL", "INFO"), format="%(asctime)s %(name)s %(message)s")
        cluster.import_user_functions(user_functions or {})
        device.set_cpu_threads(cpu_threads)
        self.world_size, self.rank = world_size, rank
        self.sequence_parallel_size = sequence_parallel_size
        self.record_memory = record_memory
        self._snapshots = 0
        timeout = datetime.timedelta(seconds=SKYRL_WORKER_NCCL_TIMEOUT_IN_S)
        is_master = master_addr is None
        address = master_addr or cluster.get_node_ip()
        # Rank 0 keeps the port from the moment it is known: nobody else can take it in between.
        self._store = dist.TCPStore(
            address, master_port or 0, world_size, is_master=is_master, timeout=timeout, wait_for_workers=False
        )
        self._master = (address, self._store.port)
        self.local_rank = device.physical_gpu_ids(ray.get_gpu_ids())
        os.environ |= {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(self._store.port),
            "WORLD_SIZE": str(world_size),
            "RANK": str(rank),
            "LOCAL_RANK": str(self.local_rank),
        }
        self._node_local_rank = local_rank
        if address == cluster.LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.mesh_rank: MeshRank | None = None

    def init_worker_process_group(self) -> MeshRank:
        """Join the process group; returns this rank's place in the mesh. Collective."""
        device.set_device(self.local_rank)
        device.bind_to_gpu_numa_node()
        if self.record_memory:
            device.start_memory_history()
        dist.init_process_group(
            device.dist_backend(),
            store=self._store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=datetime.timedelta(seconds=SKYRL_WORKER_NCCL_TIMEOUT_IN_S),
        )
        size = self.sequence_parallel_size
        self.mesh_rank = MeshRank(
            dp=self.rank // size, sp=self.rank % size, world_size=self.world_size, dp_size=self.world_size // size
        )
        return self.mesh_rank

    def get_mesh_rank(self) -> MeshRank | None:
        """This rank's place; None before `init_worker_process_group`."""
        return self.mesh_rank

    def get_master_addr_port(self) -> tuple[str, int]:
        """Where the other ranks meet rank 0."""
        return self._master

    def get_node_local_rank(self) -> int:
        """Number of this process on its node."""
        return self._node_local_rank

    def get_ray_node_id(self) -> str:
        """Ray's id of the node."""
        return str(ray.get_runtime_context().get_node_id())

    def get_gpu_id(self) -> int | None:
        """Physical GPU id that Ray assigned; None on a CPU."""
        ids = ray.get_gpu_ids()
        return int(ids[0]) if ids else None

    def import_user_functions(self, user_functions: Mapping[str, Mapping[str, bytes]]) -> None:
        """Take over functions that were registered after this actor started."""
        cluster.import_user_functions(user_functions)


class Worker(DistributedTorchRayActor):
    """A rank that holds part of a model. Args after ``cfg`` are those of `DistributedTorchRayActor`."""

    def __init__(self, cfg: TrainerConfig, *args: Any, **kwargs: Any) -> None:
        if cfg.algorithm.temperature is None:
            raise ValueError(
                "trainer.algorithm.temperature is None: a composed config takes generator.sampling_params.temperature; "
                "set it in a config that is built by hand"
            )
        super().__init__(*args, **kwargs)
        self.cfg = cfg

    @property
    def is_colocated(self) -> bool:
        """Whether inference engines share this process's GPU."""
        return self.cfg.placement.colocate_all and device.on_cuda()

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        assert self.mesh_rank is not None, "init_worker_process_group comes first"
        return self.mesh_rank.dp_size

    def set_algorithm_config(self, **fields: Any) -> None:
        """Set fields of this rank's algorithm config for all later calls.

        Raises:
            ValueError: There is no such field.
        """
        from skyrl.backends.skyrl_train.workers.loss_config import merge_into

        merge_into(self.cfg.algorithm, fields, "trainer.algorithm")

    def empty_cache(self) -> None:
        """Give cached GPU memory back."""
        device.empty_cache()

    def get_cuda_memory(self) -> dict[str, int]:
        """Bytes of GPU memory; zeros on a CPU."""
        return device.mem_info()

    def save_memory_snapshot(self, tag: str = "") -> None:
        """Write what `record_memory` recorded under ``{ckpt_path}/memory_snapshots``. Collective."""
        if not self.record_memory:
            return
        name = f"rank_{self.rank}_{tag}_{self._snapshots}.pickle"
        device.save_memory_snapshot(os.path.join(self.cfg.ckpt_path, "memory_snapshots", name))
        self._snapshots += 1
        dist.barrier()

    def finalize_pending_saves(self) -> None:
        """Wait for checkpoints that are still being written; this backend writes them at once."""

    def _all_reduce(self, values: torch.Tensor, op: Any) -> torch.Tensor:
        from skyrl.backends.skyrl_train.distributed.strategy import all_reduce

        reduced = all_reduce(values, op)
        assert isinstance(reduced, torch.Tensor)
        return reduced
