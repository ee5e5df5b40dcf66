"""The contracts of weight synchronisation: who extracts, who sends, who drives the engines.

```
WeightExtractor ─ WeightChunk ─▶ WeightTransferSender ─ buckets ─▶ engine workers
   (every trainer rank)            │ (rank 0 talks)
                                   └─ WeightSyncClient: start, update, finish ─▶ every server
WeightSyncSession: pause ─▶ TrainerRanks.send ─▶ proof ─▶ resume          (controller)
```
Nothing here imports vLLM or Ray: a strategy only knows the *name* of the engine's receiver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from skyrl.config.inference_engine import InferenceEngineConfig
from skyrl.types.weights import FingerprintPlan, WeightChunk, WeightMetadata, WeightUpdateRequest

__all__ = [
    "EngineUpdateClient",
    "RankAgreement",
    "TrainerRanks",
    "WeightChunk",
    "WeightExtractor",
    "WeightMetadata",
    "WeightSyncClient",
    "WeightSyncInitInfo",
    "WeightTransferSender",
    "WeightTransferStrategy",
    "WeightUpdateRequest",
]


class WeightExtractor(Protocol):
    """Reads whole tensors out of a sharded model. Lives on every trainer rank."""

    def extract_weights(self, dtype: torch.dtype) -> Iterator[WeightChunk]:
        """Yield every tensor of the model once, under its checkpoint name, whole.

        Collective: every rank must iterate to the end, in lockstep. Order and shapes are those of
        `get_weight_metadata`. Tensors are views or copies that stay valid until the next chunk is asked for,
        in ``dtype`` or still in the master dtype (packing casts in the same pass that copies).
        """
        ...

    def get_weight_metadata(self, dtype: torch.dtype) -> WeightMetadata:
        """Names, wire dtypes and global shapes in extraction order; gathers nothing."""
        ...

    def extract_named(self, names: Sequence[str], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(name, whole tensor cast to dtype)`` for the given checkpoint names, in their order. Collective.

        Raises:
            KeyError: a name that `get_weight_metadata` does not list.
        """
        ...


class EngineUpdateClient(Protocol):
    """What trainer rank 0 needs of the inference client: the calls that one transfer makes.

    Every call goes to all servers at once, waits for all of them, and raises naming each server that failed.
    """

    server_urls: list[str]
    """Base URL of every server (control plane)."""

    async def get_world_size(self) -> tuple[int, int]:
        """Engine workers in total, and workers per server."""
        ...

    async def init_weight_update_communicator(self, init_info: WeightSyncInitInfo) -> Any:
        """``POST /init_weight_transfer_engine`` with each server's own ``to_api_payload()``."""
        ...

    async def start_weight_update(self) -> Any:
        """``POST /start_weight_update``."""
        ...

    async def update_named_weights(self, update_info: dict[str, Any]) -> Any:
        """``POST /update_weights`` with ``{"update_info": update_info}``."""
        ...

    async def finish_weight_update(self) -> Any:
        """``POST /finish_weight_update``."""
        ...


class WeightSyncClient(EngineUpdateClient, Protocol):
    """What the controller's session needs of the inference client on top of one transfer."""

    async def pause_generation(self, clear_cache: bool = False) -> Any:
        """Freeze generation in keep mode: running requests wait, new ones queue."""
        ...

    async def resume_generation(self) -> Any:
        """Undo `pause_generation`."""
        ...

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> Any:
        """Forget cached keys and values; raises when a server answers that it could not."""
        ...

    async def wake_up(self, tags: list[str] | None = None) -> Any:
        """Bring slept memory back (``weights``, ``kv_cache``); used with colocated GPUs only."""
        ...

    async def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, list[Any]]:
        """Call a worker-extension method everywhere; one result per worker, per server URL."""
        ...

    @property
    def weight_version(self) -> int:
        """Weight syncs that succeeded so far."""
        ...

    def increment_weight_version(self) -> int:
        """Count one more successful sync and return the new version."""
        ...


class TrainerRanks(Protocol):
    """The policy actor group as the session sees it; each call reaches every rank and fails if one fails."""

    async def init(self, client: Any, ie_cfg: InferenceEngineConfig) -> WeightMetadata:
        """Run `init_weight_sync_state` on every rank; rank 0's metadata."""
        ...

    async def send(self, client: Any, ie_cfg: InferenceEngineConfig) -> dict[str, float]:
        """Run `broadcast_to_inference_engines` on every rank; rank 0's measurements."""
        ...

    async def fingerprint(self, plan: FingerprintPlan) -> dict[str, str]:
        """Run `weight_fingerprint` on every rank; rank 0's hashes by `fingerprint_key`."""
        ...


class RankAgreement(Protocol):
    """How trainer ranks tell each other that one of them failed, before a collective would hang."""

    def all_ok(self, ok: bool) -> bool:
        """Collective: whether every rank passed True."""
        ...

    def gather_text(self, text: str) -> list[str]:
        """Collective: the text of every rank, in rank order."""
        ...


@dataclass(frozen=True, kw_only=True)
class WeightSyncInitInfo:
    """What an engine must know before the first transfer; a strategy's subclass adds its fields."""

    override_existing_receiver: bool = False
    """True for servers that this run did not start: a group of an earlier run may still be there."""

    def for_servers(self, ws_per_server: int, n_servers: int, dp_size: int = 1) -> Sequence[WeightSyncInitInfo]:
        """One init info per server, in the order of the client's ``server_urls``.

        ``ws_per_server`` counts the workers of one deployment of ``dp_size`` data-parallel servers.
        """
        del ws_per_server, dp_size
        return [self] * n_servers

    def to_api_payload(self) -> dict[str, Any]:
        """The ``init_info`` of ``POST /init_weight_transfer_engine``."""
        return {}


class WeightTransferSender(ABC):
    """Moves one model's weights to every engine worker. One per trainer rank; rank 0 talks to the engines."""

    handles_prefix_cache_reset: ClassVar[bool] = False
    """Whether `send_chunks` pauses the engines and resets their caches itself."""

    @property
    @abstractmethod
    def usable(self) -> bool:
        """Whether another `send_chunks` may work without meeting the engines again."""

    @abstractmethod
    async def open(self) -> None:
        """Meet the engines. Called on every rank; only rank 0 does something.

        Raises:
            DeadlineError: engines did not come in time; it names the ranks that are missing.
        """

    @abstractmethod
    async def send_chunks(
        self, chunks: Iterable[WeightChunk], weight_metadata: WeightMetadata | None = None
    ) -> dict[str, float]:
        """Start an update, send every chunk, finish the update. Collective over trainer ranks.

        Returns:
            Seconds of each phase and the bytes on the wire (`pipeline.SendReport`); empty off rank 0.
        """

    @abstractmethod
    def teardown(self) -> None:
        """Release groups, buffers and ports. Idempotent."""


class WeightTransferStrategy(ABC):
    """One way to move weights: what to tell the engines, who sends, and which receiver they run."""

    @staticmethod
    @abstractmethod
    def create_init_info(
        ie_cfg: InferenceEngineConfig,
        inference_world_size: int | None = None,
        base_model_path: str | None = None,
        *,
        server_urls: Sequence[str] = (),
    ) -> WeightSyncInitInfo:
        """Build the init info; called on rank 0 only. It may bind a port, which the sender then owns."""

    @staticmethod
    @abstractmethod
    def create_sender(
        init_info: WeightSyncInitInfo | None,
        inference_client: EngineUpdateClient,
        *,
        ie_cfg: InferenceEngineConfig,
        agreement: RankAgreement,
        device: torch.device,
    ) -> WeightTransferSender:
        """Build this rank's sender for weights on ``device``; ``init_info`` is None off rank 0."""

    @staticmethod
    @abstractmethod
    def get_vllm_transfer_engine() -> str:
        """The name under which the receiver is registered in the engine (``--weight-transfer-config``)."""
