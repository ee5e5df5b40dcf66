"""Sync stage: the policy's weights go to the engines, and come back as a version number."""

from __future__ import annotations

from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInterface
from skyrl.backends.skyrl_train.workers.dispatch import WorkerDispatch


class SyncStage:
    """Pushes the policy's weights to the inference engines."""

    def __init__(self, dispatch: WorkerDispatch, client: InferenceEngineInterface) -> None:
        self._dispatch = dispatch
        self._client = client

    async def init(self) -> None:
        """Connect trainer ranks and engines, once."""
        await self._dispatch.init_weight_sync_state(self._client)

    async def push(self) -> dict[str, float]:
        """Send, prove and activate the weights; returns `weight_sync/*`, the new version among them.

        Raises:
            WeightSyncError: If the engines did not get the weights, or hold others. They stay paused.
        """
        return await self._dispatch.save_weights_for_sampler()
