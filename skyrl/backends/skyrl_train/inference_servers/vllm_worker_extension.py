"""What we add to every vLLM worker, given to the server as ``--worker-extension-cls``.

vLLM imports this module in each worker before it loads the model, so the imports below register the receive engines
and put the sampler fixes in place. It must stay light: neither Ray nor the client is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from skyrl.backends.skyrl_train.inference_servers import vllm_receivers, vllm_sampling
from skyrl.backends.skyrl_train.inference_servers.vllm_readback import held_shards, read_back
from skyrl.types.weights import FingerprintPlan

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

vllm_sampling.install()


class SkyRLWorkerExtension:
    """Mixed into vLLM's worker class; every public method can be called through ``/collective_rpc``."""

    if TYPE_CHECKING:  # what the worker supplies
        device: torch.device
        rank: int
        model_runner: GPUModelRunner
        weight_transfer_engine: WeightTransferEngine | None
        _weight_update_active: bool

    _skyrl_weight_version = 0

    def skyrl_worker_info(self) -> dict[str, Any]:
        """Who this worker is: rank, device, UUID of its GPU, weight version, and its model.

        ``num_parameters`` counts those that are visible; a CPU engine keeps most of its weights packed elsewhere.
        """
        cuda = self.device.type == "cuda"
        return {
            "rank": self.rank,
            "device": str(self.device),
            "device_uuid": str(torch.cuda.get_device_properties(self.device).uuid) if cuda else None,
            "num_parameters": sum(parameter.numel() for parameter in self._skyrl_model().parameters()),
            "weight_version": self._skyrl_weight_version,
        }

    def skyrl_weight_shards(self, shapes: dict[str, list[int]]) -> dict[str, list[list[int] | None]]:
        """The slices of each checkpoint tensor (whole shape by name) that this worker holds; see `held_shards`."""
        return held_shards(self._skyrl_model(), shapes)

    def skyrl_read_back(self, plan: dict[str, Any]) -> list[dict[str, Any]]:
        """Hash what this worker holds of the planned tensors; see `vllm_readback.read_back`."""
        return read_back(self._skyrl_model(), FingerprintPlan.from_json_dict(plan))

    def skyrl_set_weight_version(self, version: int) -> dict[str, int]:
        """Remember which weights the engine holds."""
        self._skyrl_weight_version = int(version)
        return {"weight_version": self._skyrl_weight_version}

    def skyrl_get_weight_version(self) -> dict[str, int]:
        """The version given last; 0 means the weights that the engine started with."""
        return {"weight_version": self._skyrl_weight_version}

    def skyrl_abort_weight_update(self) -> dict[str, bool]:
        """Give up an update that failed, so that a new one may start and resend everything.

        The model is not complete afterwards and must not run before that.
        """
        was_active, self._weight_update_active = self._weight_update_active, False
        if self.weight_transfer_engine is not None:
            self.weight_transfer_engine.reset_weight_update_target()
        vllm_receivers.discard_partial_reload(self._skyrl_model())
        return {"was_active": was_active}

    def _skyrl_model(self) -> torch.nn.Module:
        return self.model_runner.get_model()
