"""Weight transfer by NCCL broadcast: GPU trainers to GPU engines on other devices.

Same protocol as gloo, with buckets in GPU memory. The group is a torch NCCL group over a store of our own and not
vLLM's built-in ``nccl`` engine, because that one checks no bytes and would make the trainer import vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyrl.backends.skyrl_train.weight_sync.base import (
    EngineUpdateClient,
    RankAgreement,
    WeightSyncInitInfo,
    WeightTransferStrategy,
)
from skyrl.backends.skyrl_train.weight_sync.gloo import bucket_bytes, meet
from skyrl.backends.skyrl_train.weight_sync.group import TransferGroup, build_nccl_group
from skyrl.backends.skyrl_train.weight_sync.group_sender import BroadcastInitInfo, GroupSender
from skyrl.config.inference_engine import InferenceEngineConfig

NCCL_ENGINE = "skyrl_nccl"
"""Name of the receiver in the engine."""


class BroadcastTransferStrategy(WeightTransferStrategy):
    """Buckets in GPU memory, broadcast by NCCL."""

    @staticmethod
    def create_init_info(
        ie_cfg: InferenceEngineConfig,
        inference_world_size: int | None = None,
        base_model_path: str | None = None,
        *,
        server_urls: Sequence[str] = (),
    ) -> BroadcastInitInfo:
        """See `WeightTransferStrategy.create_init_info`."""
        del base_model_path
        if inference_world_size is None:
            raise ValueError("a broadcast needs the number of engine workers")
        return meet(ie_cfg, inference_world_size, server_urls)

    @staticmethod
    def create_sender(
        init_info: WeightSyncInitInfo | None,
        inference_client: EngineUpdateClient,
        *,
        ie_cfg: InferenceEngineConfig,
        agreement: RankAgreement,
        device: torch.device,
    ) -> GroupSender:
        """See `WeightTransferStrategy.create_sender`."""
        if init_info is not None and not isinstance(init_info, BroadcastInitInfo):
            raise TypeError(f"nccl needs a BroadcastInitInfo, got {type(init_info).__name__}")

        def join(info: BroadcastInitInfo) -> TransferGroup:
            if info.meeting is None:
                raise ValueError("only the rank that bound the meeting point joins as rank 0")
            return build_nccl_group(
                info.meeting.store, 0, info.world_size, device=device, timeout_s=info.meeting.timeout_s
            )

        return GroupSender(
            init_info,
            inference_client,
            agreement=agreement,
            build_group=join,
            bucket_bytes=bucket_bytes(ie_cfg),
            timeout_s=ie_cfg.weight_sync_timeout_s,
            device=device,
        )

    @staticmethod
    def get_vllm_transfer_engine() -> str:
        """See `WeightTransferStrategy.get_vllm_transfer_engine`."""
        return NCCL_ENGINE
