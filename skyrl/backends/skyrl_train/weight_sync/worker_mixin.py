"""The trainer rank's half of weight synchronisation, mixed into the policy worker."""

from __future__ import annotations

import datetime
import logging

import torch
import torch.distributed as dist

from skyrl.backends.skyrl_train.device import device
from skyrl.backends.skyrl_train.weight_sync.base import (
    EngineUpdateClient,
    RankAgreement,
    WeightExtractor,
    WeightMetadata,
    WeightTransferSender,
    WeightTransferStrategy,
)
from skyrl.backends.skyrl_train.weight_sync.fingerprint import fingerprint_tensors
from skyrl.backends.skyrl_train.weight_sync.pipeline import GroupAgreement, OtherRankFailed, SingleRank
from skyrl.backends.skyrl_train.weight_sync.strategy import get_transfer_strategy
from skyrl.backends.skyrl_train.weight_sync.threads import SerialThread
from skyrl.config.inference_engine import InferenceEngineConfig
from skyrl.types.weights import FingerprintPlan, torch_dtype

logger = logging.getLogger(__name__)


class WeightSyncWorkerMixin:
    """Adds weight synchronisation to a worker that supplies the attributes below.

    Every method is collective: all ranks must call it, in the same order.
    """

    weight_extractor: WeightExtractor
    """Reads whole tensors out of this worker's model."""
    rank: int
    """Global rank of this trainer process; rank 0 talks to the engines."""
    world_size: int
    """Trainer processes."""
    is_colocated: bool
    """Whether trainer ranks and engine workers share GPUs."""

    _sender: WeightTransferSender | None = None
    _agreement: RankAgreement | None = None
    _wire_dtype: torch.dtype | None = None

    async def init_weight_sync_state(self, client: EngineUpdateClient, ie_cfg: InferenceEngineConfig) -> WeightMetadata:
        """Choose the transport and meet the engines; call again after engines were restarted.

        Returns:
            Names, wire dtypes and shapes of everything that a sync sends.
        """
        self._wire_dtype = torch_dtype(ie_cfg.model_dtype)
        agreement = self._agreement = self._agreement or self._make_agreement(ie_cfg)
        strategy = get_transfer_strategy(ie_cfg.weight_sync_backend, self.is_colocated, device().type)
        error: BaseException | None = None
        try:
            await self._open_sender(strategy, client, ie_cfg, agreement)
        except Exception as caught:  # noqa: BLE001 - raised below, after the other ranks were told
            error = caught
        if not await self._all_ok(error is None):
            self._drop_sender()
            raise error or OtherRankFailed
        return self.weight_extractor.get_weight_metadata(self._wire_dtype)

    async def broadcast_to_inference_engines(
        self, client: EngineUpdateClient, ie_cfg: InferenceEngineConfig, model_id: str | None = None
    ) -> dict[str, float]:
        """Send every weight: start, updates, finish. The caller has paused the engines.

        After a failure the next call meets the engines again first.

        Returns:
            Measurements of rank 0 (`pipeline.SendReport`); empty on other ranks.
        """
        if model_id is not None:
            raise ValueError(f"model_id={model_id!r}: adapters are not synchronised yet; pass None for the full model")
        if self._wire_dtype is None or not await self._all_ok(self._sender is not None and self._sender.usable):
            logger.warning("meeting the inference engines again: the last weight transfer failed, or there was none")
            await self.init_weight_sync_state(client, ie_cfg)
        sender, dtype = self._sender, self._wire_dtype
        assert sender is not None and dtype is not None
        with torch.no_grad():
            metadata = self.weight_extractor.get_weight_metadata(dtype)
            return await sender.send_chunks(self.weight_extractor.extract_weights(dtype), metadata)

    def weight_fingerprint(self, plan: FingerprintPlan) -> dict[str, str]:
        """Hash the planned samples of this model, cast to the wire dtype, by `fingerprint_key`."""
        dtype = self._wire_dtype
        if dtype is None:
            raise RuntimeError("weight_fingerprint needs init_weight_sync_state first")
        with torch.no_grad():
            return fingerprint_tensors(self.weight_extractor.extract_named(plan.names, dtype), plan)

    def teardown_weight_sync(self) -> None:
        """Leave the transfer group. Idempotent."""
        self._drop_sender()

    async def _open_sender(
        self,
        strategy: type[WeightTransferStrategy],
        client: EngineUpdateClient,
        ie_cfg: InferenceEngineConfig,
        agreement: RankAgreement,
    ) -> None:
        self._drop_sender()
        init_info = None
        if self.rank == 0:
            workers, _ = await client.get_world_size()
            init_info = strategy.create_init_info(ie_cfg, workers, server_urls=client.server_urls)
        self._sender = strategy.create_sender(init_info, client, ie_cfg=ie_cfg, agreement=agreement, device=device())
        await self._sender.open()

    def _drop_sender(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.teardown()

    def _make_agreement(self, ie_cfg: InferenceEngineConfig) -> RankAgreement:
        if self.world_size == 1:
            return SingleRank()
        patience = datetime.timedelta(seconds=2 * ie_cfg.weight_sync_timeout_s)  # rank 0 may wait for engines so long
        return GroupAgreement(dist.new_group(backend="gloo", timeout=patience))

    async def _all_ok(self, ok: bool) -> bool:
        agreement = self._agreement
        assert agreement is not None
        thread = SerialThread("weight-agree")
        try:
            return await thread.submit(lambda: agreement.all_ok(ok))
        finally:
            thread.close()
