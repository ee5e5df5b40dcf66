"""Receive engines for vLLM's weight-transfer endpoints; importing this module registers them in the process.

The bytes of a bucket are checked before any of them reaches the model, and buckets are loaded in the order in which
they came, as far as possible after the wire is done with the processor.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import LOADING_LAYERS, get_layerwise_info

from skyrl.backends.skyrl_train.weight_sync.broadcast import NCCL_ENGINE
from skyrl.backends.skyrl_train.weight_sync.buffers import ReceiveBuffers
from skyrl.backends.skyrl_train.weight_sync.cuda_ipc import IPC_ENGINE, IpcHandle, open_handle
from skyrl.backends.skyrl_train.weight_sync.gloo import GLOO_ENGINE
from skyrl.backends.skyrl_train.weight_sync.group import (
    TransferGroup,
    address_towards,
    build_gloo_group,
    build_nccl_group,
    join_store,
)
from skyrl.backends.skyrl_train.weight_sync.packing import BucketLayout, bucket_views, require_checksum

logger = logging.getLogger(__name__)

_RELOAD_LOGGER = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class GroupInitInfo(WeightTransferInitInfo):
    """Where the trainer waits; see `BroadcastInitInfo`, which makes it."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float = 600.0


@dataclass
class BucketUpdateInfo(WeightTransferUpdateInfo):
    """One bucket; see `BucketLayout`, which makes it."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    num_bytes: list[int]
    checksum: str | None = None
    index: int = 0
    count: int = 1

    def layout(self) -> BucketLayout:
        """The layout of the bucket; ValueError if it contradicts itself."""
        return BucketLayout(
            index=self.index,
            count=self.count,
            names=self.names,
            dtype_names=self.dtype_names,
            shapes=self.shapes,
            num_bytes=self.num_bytes,
        )


@dataclass
class IpcUpdateInfo(BucketUpdateInfo):
    """One bucket in GPU memory that trainer ranks share."""

    handles: dict[str, dict[str, Any]] | None = None
    """Rebuild arguments (`IpcHandle`) by UUID of the GPU."""


BACKLOG_BYTES = 256 * 1024**2
"""Host memory in which received buckets may wait to be loaded. While there is room the wire has the processor to
itself; when it is full, every further bucket travels while an earlier one loads."""


class BucketReceiver(WeightTransferEngine):
    """What all receivers share: order and completeness of buckets, checksums, loading, and cleaning up."""

    update_info_cls: ClassVar[type[BucketUpdateInfo]] = BucketUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._next_index = 0
        self._complete = False
        self._waiting: deque[tuple[int, list[tuple[str, torch.Tensor]]]] = deque()
        self._waiting_bytes = 0

    def start_weight_update(self) -> None:
        """Begin an update; what a failed one left behind is discarded first."""
        discard_partial_reload(self.model)
        self._next_index, self._complete = 0, False
        self._forget_waiting()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one bucket; load earlier ones when too many wait, and all that wait after the last bucket."""
        info = self.parse_update_info(update_info)
        try:
            self.receive_weights(info)
        except BaseException:
            self._forget_waiting()
            raise

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
        """See `update_weights`.

        Raises:
            ValueError: the bucket is out of order, or its bytes are not those that were announced.
        """
        layout = update_info.layout()
        if layout.index != self._next_index:
            raise ValueError(f"expected bucket {self._next_index + 1}, got {layout.index + 1} of {layout.count}")
        arrived = self._receive(update_info, layout)
        require_checksum(arrived, update_info.checksum, layout)
        self._waiting.append((layout.size_bytes, bucket_views(arrived, layout)))
        self._waiting_bytes += layout.size_bytes
        del arrived
        self._next_index += 1
        if layout.is_last:
            self._load_waiting(0)
            self._complete = True

    def finish_weight_update(self) -> None:
        """End an update.

        Raises:
            RuntimeError: not all buckets came; the model is not complete and must not run.
        """
        if not self._complete:
            raise RuntimeError(f"the weight update ended after {self._next_index} buckets; the last one never came")
        with _quiet(_RELOAD_LOGGER):
            finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_heads(self.model)
        self._complete = False

    def _receive(self, info: BucketUpdateInfo, layout: BucketLayout) -> torch.Tensor:
        """Get the bytes of a bucket, loading the bucket before it meanwhile."""
        raise NotImplementedError

    def _load_waiting(self, leave_bytes: int) -> None:
        """Load waiting buckets, oldest first, until at most ``leave_bytes`` wait."""
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            while self._waiting and self._waiting_bytes > leave_bytes:
                size, weights = self._waiting.popleft()
                self._waiting_bytes -= size
                self.model.load_weights(self._on_device(weights))
                del weights
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def _on_device(self, weights: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor.to(self.device)) for name, tensor in weights)

    def _forget_waiting(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0

    def shutdown(self) -> None:
        """Drop buffers."""
        self._forget_waiting()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Not here: the trainer's side is `skyrl.backends.skyrl_train.weight_sync`."""
        raise NotImplementedError("weights are sent by skyrl.backends.skyrl_train.weight_sync")


class GroupReceiver(BucketReceiver):
    """Receives buckets as a member of the trainer's broadcast group."""

    init_info_cls = GroupInitInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: TransferGroup | None = None

    def init_transfer_engine(self, init_info: GroupInitInfo) -> None:
        """Join the trainer's group; a group of an earlier trainer is dropped first."""
        self._close_group()
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        self._group = self._join(init_info, rank)
        logger.info("joined the weight transfer group as rank %d of %d", rank, init_info.world_size)

    def _join(self, info: GroupInitInfo, rank: int) -> TransferGroup:
        raise NotImplementedError

    def _take_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _backlog_bytes(self) -> int:
        """How much may wait while another bucket arrives."""
        return 0

    def _receive(self, info: BucketUpdateInfo, layout: BucketLayout) -> torch.Tensor:
        if self._group is None:
            raise RuntimeError("the weight transfer group is not there; call init_weight_transfer_engine first")
        buffer = self._take_buffer(layout.size_bytes)
        work = self._group.broadcast(buffer)
        try:
            self._load_waiting(self._backlog_bytes())
        finally:
            work.wait()  # also after a failed load: the buffer must not die under a running receive
        return buffer

    def _close_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def shutdown(self) -> None:
        """Leave the group."""
        super().shutdown()
        self._close_group()


class GlooWeightTransferEngine(GroupReceiver):
    """Receives into host memory over gloo; `weight_sync.gloo` sends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffers = ReceiveBuffers(BACKLOG_BYTES)

    def _join(self, info: GroupInitInfo, rank: int) -> TransferGroup:
        store = join_store(info.master_address, info.master_port, rank, info.world_size, info.timeout_s)
        address = address_towards(info.master_address, info.master_port)
        return build_gloo_group(store, rank, info.world_size, address=address, timeout_s=info.timeout_s)

    def _take_buffer(self, size: int) -> torch.Tensor:
        return self._buffers.take(size)

    def _backlog_bytes(self) -> int:
        return BACKLOG_BYTES


class NcclWeightTransferEngine(GroupReceiver):
    """Receives into GPU memory over NCCL; `weight_sync.broadcast` sends."""

    def _join(self, info: GroupInitInfo, rank: int) -> TransferGroup:
        store = join_store(info.master_address, info.master_port, rank, info.world_size, info.timeout_s)
        return build_nccl_group(store, rank, info.world_size, device=self.device, timeout_s=info.timeout_s)

    def _receive(self, info: BucketUpdateInfo, layout: BucketLayout) -> torch.Tensor:
        buffer = super()._receive(info, layout)
        torch.cuda.synchronize(self.device)
        return buffer


class CudaIpcWeightTransferEngine(BucketReceiver):
    """Reads buckets where trainer ranks on the same GPU hold them; `weight_sync.cuda_ipc` shares them."""

    init_info_cls = NoInitInfo
    update_info_cls = IpcUpdateInfo

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing to set up."""

    def _receive(self, info: BucketUpdateInfo, layout: BucketLayout) -> torch.Tensor:
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        handles = info.handles if isinstance(info, IpcUpdateInfo) and info.handles else {}
        if uuid not in handles:
            raise ValueError(f"no IPC handle for this worker's GPU {uuid}; the trainer sent {sorted(handles)}")
        return open_handle(IpcHandle(**handles[uuid]), device_index=self.device.index or 0)

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
        """See `BucketReceiver.receive_weights`; loads at once, for the trainer frees the bucket after the call."""
        super().receive_weights(update_info)
        self._load_waiting(0)


@contextlib.contextmanager
def _quiet(noisy: logging.Logger) -> Iterator[None]:
    """Silence warnings: every layer without tensors of its own (rotary tables, a tied head) would give one a sync.

    That all tensors came is checked before, by the sequence of buckets.
    """
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        yield
    finally:
        noisy.setLevel(level)


def discard_partial_reload(model: torch.nn.Module) -> None:
    """Forget the tensors that an unfinished update left in layers, so that a full resend counts from zero.

    vLLM counts loaded elements per layer across updates: without this, the next update would complete a layer
    from old and new parts and drop the rest of the new ones.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0
    LOADING_LAYERS.clear()


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Refresh the kernel's copy of an output head that shares its weight with the embedding.

    A tied head receives no tensor of its own, so the layerwise reload leaves it alone. Its weight is the embedding's
    and new; but a CPU engine multiplies with a packed copy, which would stay that of the first weights for ever.
    """
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            if id(module.weight) in seen:
                module.quant_method.process_weights_after_loading(module)
            seen.add(id(module.weight))


for _name, _engine in (
    (GLOO_ENGINE, GlooWeightTransferEngine),
    (NCCL_ENGINE, NcclWeightTransferEngine),
    (IPC_ENGINE, CudaIpcWeightTransferEngine),
):
    with contextlib.suppress(ValueError):  # registered before: the module was imported a second time
        WeightTransferEngineFactory.register_engine(_name, _engine)
