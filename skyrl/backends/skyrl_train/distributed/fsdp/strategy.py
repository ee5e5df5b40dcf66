"""FSDP2 as a training strategy: shards one model and owns its optimizer, offload and files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from skyrl.backends.skyrl_train import device
from skyrl.backends.skyrl_train.distributed import strategy
from skyrl.backends.skyrl_train.distributed.fsdp import checkpoint, export, offload, shard
from skyrl.backends.skyrl_train.distributed.fsdp.optimizer import OptimizerSteps
from skyrl.config.roles import FSDPConfig, OptimizerConfig

logger = logging.getLogger(__name__)


class FSDPStrategy:
    """One sharded model of one role, on every rank of its process group.

    Args:
        fsdp_config: How to shard.
        optimizer_config: None builds neither optimizer nor schedule.
        bf16: Compute in bf16 (masters keep the dtype they were loaded in); False computes in fp32.
        seed: Seed of the run; a rank adds its own number.
        num_training_steps: Optimizer steps of the whole run, for schedules that need it.
    """

    def __init__(
        self,
        fsdp_config: FSDPConfig,
        optimizer_config: OptimizerConfig | None = None,
        *,
        bf16: bool = True,
        seed: int = 42,
        num_training_steps: int | None = None,
    ) -> None:
        self.fsdp_config = fsdp_config
        self.optimizer_config = optimizer_config
        self.bf16 = bf16
        self.seed = seed
        self.num_training_steps = num_training_steps
        self.steps: OptimizerSteps | None = None
        self._root: nn.Module | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the forward pass."""
        return (
            shard.mixed_precision_policy(self.fsdp_config.mixed_precision, bf16=self.bf16).param_dtype or torch.float32
        )

    @property
    def root(self) -> nn.Module:
        """The sharded module."""
        assert self._root is not None, "prepare comes first"
        return self._root

    @property
    def manual_offload(self) -> bool:
        """Whether offload and backload move anything: FSDP2's own offload replaces them."""
        return device.host_offload_useful() and not self.fsdp_config.cpu_offload

    def seed_everything(self) -> None:
        """Seed this rank's generators."""
        strategy.seed_everything(self.seed + dist.get_rank())

    def prepare(self, root: nn.Module) -> nn.Module:
        """Shard a model whose weights rank 0 holds, and build its optimizer. Collective."""
        mesh = shard.create_mesh(dist.get_world_size(), self.fsdp_config.fsdp_size)
        shard.shard_with_weights(root, mesh, self.fsdp_config, bf16=self.bf16)
        self._root = root
        if self.optimizer_config is not None:
            self.steps = OptimizerSteps(root.parameters(), self.optimizer_config, self.num_training_steps)
        return root

    def release_gathered(self) -> None:
        """Free gathered parameters after a forward pass without backward; they would be stale after a step."""
        assert isinstance(self.root, shard.FSDPModule)
        self.root.reshard()

    def optimizer_step(self) -> float:
        """Clip, step and clear; returns the gradient norm before clipping. Collective.

        Raises:
            RuntimeError: The model was built without an optimizer.
        """
        if self.steps is None:
            raise RuntimeError("this model has no optimizer (inference_only_init, or a reference): it cannot step")
        return self.steps.step()

    def offload_to_cpu(self, *, offload_optimizer: bool = True, offload_model: bool = True) -> None:
        """Move the parts to host memory."""
        if not self.manual_offload:
            return
        if offload_model:
            offload.move_model(self.root, to_device=False)
        if offload_optimizer and self.steps is not None:
            offload.move_optimizer(self.steps.optimizer, to_device=False)
        device.empty_cache()

    def backload_to_gpu(self, *, backload_optimizer: bool = True, backload_model: bool = True) -> None:
        """Move the parts back to the training device."""
        if not self.manual_offload:
            return
        if backload_model:
            offload.move_model(self.root, to_device=True)
        if backload_optimizer and self.steps is not None:
            offload.move_optimizer(self.steps.optimizer, to_device=True)

    def all_reduce(
        self, data: Mapping[str, float] | torch.Tensor | float, op: strategy.ReduceOp = "mean"
    ) -> dict[str, float] | torch.Tensor | float:
        """Reduce numbers over ranks; see `distributed.strategy.all_reduce`."""
        return strategy.all_reduce(data, op)

    def save_checkpoint(
        self,
        model: Any,
        ckpt_dir: str,
        *,
        tokenizer: Any | None = None,
        client_state: Mapping[str, Any] | None = None,
    ) -> None:
        """Write model, optimizer, schedule and random state. Collective; raises CheckpointError."""
        checkpoint.save(
            ckpt_dir,
            model,
            self.steps,
            client_state=client_state,
            hf_model=_transformers_part(model),
            tokenizer=tokenizer,
        )

    def load_checkpoint(
        self, model: Any, ckpt_dir: str | None, *, load_optimizer: bool = True, load_scheduler: bool = True
    ) -> dict[str, Any]:
        """Read what `save_checkpoint` wrote, at any world size. Collective; see `checkpoint.load`."""
        steps = self.steps if load_optimizer else None
        return checkpoint.load(ckpt_dir, model, steps, load_scheduler=load_scheduler, seed=self.seed)

    def save_hf_model(self, model: Any, path: str, tokenizer: Any | None = None) -> None:
        """Export a Hugging Face directory with weights in the compute dtype. Collective; raises CheckpointError."""
        export.save_hf_model(path, model, self.compute_dtype, tokenizer)


def _transformers_part(model: nn.Module) -> Any:
    """The outermost transformers model of a module."""
    from transformers import PreTrainedModel

    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))
