"""Weight transfer by gloo: CPU engines, CPU trainers, and any pair of which one side is a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyrl.backends.skyrl_train.weight_sync.base import (
    EngineUpdateClient,
    RankAgreement,
    WeightSyncInitInfo,
    WeightTransferStrategy,
)
from skyrl.backends.skyrl_train.weight_sync.group import Rendezvous, TransferGroup, build_gloo_group, trainer_address
from skyrl.backends.skyrl_train.weight_sync.group_sender import BroadcastInitInfo, GroupSender
from skyrl.config.inference_engine import InferenceEngineConfig

GLOO_ENGINE = "gloo"
"""Name of the receiver in the engine."""
GLOO_BUCKET_BYTES = 128 * 1024**2
"""Largest bucket: small enough that filling, sending and loading overlap, large enough for the wire's full speed."""


def meet(ie_cfg: InferenceEngineConfig, inference_world_size: int, server_urls: Sequence[str]) -> BroadcastInitInfo:
    """Bind the trainer's meeting point for all engine workers; rank 0 only."""
    world_size = 1 + inference_world_size
    meeting = Rendezvous(trainer_address(server_urls), world_size, ie_cfg.weight_sync_timeout_s)
    return BroadcastInitInfo(
        master_address=meeting.host,
        master_port=meeting.port,
        world_size=world_size,
        timeout_s=ie_cfg.weight_sync_timeout_s,
        meeting=meeting,
        override_existing_receiver=not ie_cfg.run_engines_locally,
    )


def bucket_bytes(ie_cfg: InferenceEngineConfig) -> int:
    """Bucket size that the configuration asks for."""
    return int(ie_cfg.weight_transfer_threshold_cuda_ipc_GB * 1024**3)


def _join(info: BroadcastInitInfo) -> TransferGroup:
    if info.meeting is None:
        raise ValueError("only the rank that bound the meeting point joins as rank 0")
    return build_gloo_group(
        info.meeting.store, 0, info.world_size, address=info.master_address, timeout_s=info.meeting.timeout_s
    )


class GlooTransferStrategy(WeightTransferStrategy):
    """Buckets in host memory, broadcast by gloo."""

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
        """See `WeightTransferStrategy.create_sender`; buckets are in host memory wherever the weights are."""
        del device
        if init_info is not None and not isinstance(init_info, BroadcastInitInfo):
            raise TypeError(f"gloo needs a BroadcastInitInfo, got {type(init_info).__name__}")
        return GroupSender(
            init_info,
            inference_client,
            agreement=agreement,
            build_group=_join,
            bucket_bytes=min(GLOO_BUCKET_BYTES, bucket_bytes(ie_cfg)),
            timeout_s=ie_cfg.weight_sync_timeout_s,
            device=torch.device("cpu"),
        )

    @staticmethod
    def get_vllm_transfer_engine() -> str:
        """See `WeightTransferStrategy.get_vllm_transfer_engine`."""
        return GLOO_ENGINE
