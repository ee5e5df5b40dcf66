"""The controller's half of weight synchronisation: one state machine over client and trainer ranks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from skyrl.backends.skyrl_train.weight_sync.base import TrainerRanks, WeightSyncClient
from skyrl.config.inference_engine import InferenceEngineConfig


class WeightSyncSession:
    """Drives pause, send, proof and resume."""

    def __init__(
        self,
        client: WeightSyncClient,
        ranks: TrainerRanks,
        ie_cfg: InferenceEngineConfig,
        *,
        seed: int,
        device_type: str,
        colocated: bool,
        reset_cache: bool = True,
        release_trainer_memory: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        raise NotImplementedError

    async def init(self) -> None:
        """Let trainer and engines meet."""
        raise NotImplementedError

    async def push(self) -> dict[str, float]:
        """Sync the weights and return the metrics ``weight_sync/*``."""
        raise NotImplementedError
