"""The trainer rank's half of weight synchronisation, mixed into the policy worker."""

from __future__ import annotations

from skyrl.backends.skyrl_train.weight_sync.base import EngineUpdateClient, WeightExtractor, WeightMetadata
from skyrl.config.inference_engine import InferenceEngineConfig
from skyrl.types.weights import FingerprintPlan


class WeightSyncWorkerMixin:
    """Adds weight synchronisation to a worker that supplies the four attributes below."""

    weight_extractor: WeightExtractor
    rank: int
    world_size: int
    is_colocated: bool

    async def init_weight_sync_state(self, client: EngineUpdateClient, ie_cfg: InferenceEngineConfig) -> WeightMetadata:
        """Choose the transport and meet the engines. Collective; call again after engines restart."""
        raise NotImplementedError

    async def broadcast_to_inference_engines(
        self, client: EngineUpdateClient, ie_cfg: InferenceEngineConfig, model_id: str | None = None
    ) -> dict[str, float]:
        """Send every weight: start, updates, finish. Collective; the caller has paused the engines."""
        raise NotImplementedError

    def weight_fingerprint(self, plan: FingerprintPlan) -> dict[str, str]:
        """Hash the planned samples of this model, cast to the wire dtype, by `fingerprint_key`. Collective."""
        raise NotImplementedError
