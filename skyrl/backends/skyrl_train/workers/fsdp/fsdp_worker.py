"""Policy, critic and reference as FSDP2 actors. Every public method is called on all ranks of a role at once."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import ray
import torch
from torch import Tensor, nn

from skyrl.backends.skyrl_train import device
from skyrl.backends.skyrl_train.distributed.dispatch import WorkerOutput
from skyrl.backends.skyrl_train.distributed.fsdp.shard import copy_into, whole_tensor
from skyrl.backends.skyrl_train.distributed.fsdp.strategy import FSDPStrategy
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.weight_sync.worker_mixin import WeightSyncWorkerMixin
from skyrl.backends.skyrl_train.workers.base import Worker
from skyrl.backends.skyrl_train.workers.critic import critic_micro_batch_loss
from skyrl.backends.skyrl_train.workers.fsdp.critic_model import (
    CriticModel,
    get_llm_for_sequence_regression,
    save_critic,
)
from skyrl.backends.skyrl_train.workers.fsdp.model import HFModelWrapper, score_response
from skyrl.backends.skyrl_train.workers.fsdp.weight_extractor import FSDPWeightExtractor
from skyrl.backends.skyrl_train.workers.loss_config import effective_loss
from skyrl.backends.skyrl_train.workers.metrics import MetricBuffer
from skyrl.backends.skyrl_train.workers.micro_batches import get_microbatch_iterator
from skyrl.backends.skyrl_train.workers.policy import LossScale, PolicyRows, finish_policy_metrics, policy_loss
from skyrl.backends.skyrl_train.workers.sampler_columns import SamplerColumns, check_columns, sampler_head
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.config.roles import FSDPConfig, OptimizerConfig

logger = logging.getLogger(__name__)


class FSDPWorker(Worker):
    """One rank of an FSDP2 model: building, offload, files and learning rate."""

    role: str
    strategy: FSDPStrategy | None = None
    module: Any = None
    _loaded: tuple[str, nn.Module] | None = None

    # -- what a role decides

    def _build(self, model_path: str) -> nn.Module:
        """The model, with weights on rank 0 only."""
        raise NotImplementedError

    def _fsdp_config(self) -> FSDPConfig:
        raise NotImplementedError

    def _optimizer_config(self) -> OptimizerConfig | None:
        return None

    # -- building

    def load_weights(self, model_path: str) -> None:
        """Read the model into host memory ahead of `init_model`, so that it overlaps with the start of engines."""
        self._loaded = (model_path, self._build(model_path))

    def init_model(self, model_path: str, num_training_steps: int | None = None) -> None:
        """Load, shard and build the optimizer. Collective.

        Args:
            model_path: Hub name or directory.
            num_training_steps: Optimizer steps of the run, for the schedule.

        Raises:
            ModelLoadError: The path holds no usable model.
            ConfigError: The schedule or the sharding cannot be had.
        """
        self.strategy = FSDPStrategy(
            self._fsdp_config(),
            self._optimizer_config(),
            bf16=self.cfg.bf16,
            seed=self.cfg.seed,
            num_training_steps=num_training_steps,
        )
        self.strategy.seed_everything()
        if self._loaded is None or self._loaded[0] != model_path:
            self.load_weights(model_path)
        assert self._loaded is not None
        module, self._loaded = self._loaded[1], None
        if self._optimizer_config() is None:
            module.requires_grad_(False)
        elif self.cfg.gradient_checkpointing:
            module.gradient_checkpointing_enable(  # type: ignore[operator]
                use_reentrant=self.cfg.gradient_checkpointing_use_reentrant
            )
        self.module = self.strategy.prepare(module)
        self.module.eval()
        if self.cfg.use_expandable_segments:
            device.set_expandable_segments(True)

    @property
    def _strategy(self) -> FSDPStrategy:
        if self.strategy is None:
            raise RuntimeError(f"{self.role}: init_model comes first")
        return self.strategy

    @property
    def checkpointed_module(self) -> nn.Module:
        """The module whose parameter names checkpoints use."""
        return self.module.model

    # -- residency

    def offload_to_cpu(self, offload_optimizer: bool = True, offload_model: bool = True) -> None:
        """Move to host memory; nothing moves on a CPU."""
        self._strategy.offload_to_cpu(offload_optimizer=offload_optimizer, offload_model=offload_model)

    def backload_to_gpu(self, backload_optimizer: bool = True, backload_model: bool = True) -> None:
        """Move back to the device."""
        self._strategy.backload_to_gpu(backload_optimizer=backload_optimizer, backload_model=backload_model)

    # -- files

    def save_checkpoint(self, ckpt_dir: str, tokenizer: Any | None = None) -> None:
        """Write model, optimizer, schedule and random state. Collective; raises CheckpointError."""
        self._strategy.save_checkpoint(self.checkpointed_module, ckpt_dir, tokenizer=tokenizer)

    def load_checkpoint(
        self, ckpt_dir: str | None, load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True
    ) -> dict[str, Any]:
        """Read a checkpoint of any world size; returns its client state. Collective.

        Without ``load_optimizer_states`` the live optimizer and schedule stay untouched.
        """
        return self._strategy.load_checkpoint(
            self.checkpointed_module,
            ckpt_dir,
            load_optimizer=load_optimizer_states,
            load_scheduler=load_lr_scheduler_states,
        )

    def save_hf_model(self, export_dir: str, tokenizer: Any | None = None) -> None:
        """Export a Hugging Face directory. Collective; raises CheckpointError."""
        self._strategy.save_hf_model(self.module.model, export_dir, tokenizer)

    # -- optimizer

    def optim_step(self) -> float:
        """Clip and step; returns the gradient norm before clipping. Collective."""
        norm = self._strategy.optimizer_step()
        self.save_memory_snapshot("optim_step")
        return norm

    def get_lr(self) -> float | None:
        """Learning rate of the next step; None without an optimizer."""
        steps = self._strategy.steps
        return None if steps is None else steps.lr

    def set_lr(self, lr: float) -> None:
        """Set the learning rate by hand from now on; nothing happens without an optimizer."""
        if self._strategy.steps is not None:
            self._strategy.steps.set_lr(lr)

    # -- state for other roles

    def parameter_sizes(self) -> list[tuple[str, int]]:
        """Names and byte sizes of all parameters, in order."""
        return [(name, p.numel() * p.element_size()) for name, p in self.checkpointed_module.named_parameters()]

    def gather_parameters(self, names: list[str]) -> dict[str, Tensor]:
        """Whole parameters on rank 0's CPU; empty elsewhere. Collective."""
        parameters = dict(self.checkpointed_module.named_parameters())
        whole = {name: whole_tensor(parameters[name]) for name in names}
        return {name: tensor.cpu() for name, tensor in whole.items()} if self.rank == 0 else {}

    def load_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite parameters with whole tensors; every rank takes its part. Collective."""
        parameters = dict(self.checkpointed_module.named_parameters())
        for name, value in values.items():
            copy_into(parameters[name], value)

    # -- shared shell of the compute calls

    @contextlib.contextmanager
    def _inference(self) -> Iterator[None]:
        """Eval mode without gradients; gathered parameters are freed afterwards."""
        self.module.eval()
        with torch.no_grad():
            yield
        self._strategy.release_gathered()

    def _micro_batches(self, data: TrainingInputBatch, size: int) -> Iterator[TrainingInputBatch]:
        for micro in get_microbatch_iterator(data, size, self.cfg.max_tokens_per_microbatch):
            yield micro.to(device.device())

    def _columns(self, micro: TrainingInputBatch, *, centering: bool = False) -> SamplerColumns:
        return SamplerColumns.of(micro, replay=self.cfg.algorithm.enable_sample_support_replay, centering=centering)

    def _forward_log_probs(self, data: TrainingInputBatch) -> WorkerOutput:
        temperature = self.cfg.algorithm.temperature
        with self._inference():
            parts = [
                score_response(self.module, micro, self._columns(micro), temperature).log_probs.cpu()
                for micro in self._micro_batches(data, self.cfg.micro_forward_batch_size_per_gpu)
            ]
        return WorkerOutput(tensors={"logprobs": torch.cat(parts)})


class FSDPPolicyWorkerBase(WeightSyncWorkerMixin, FSDPWorker):
    """The model that learns."""

    role = "policy"

    def _build(self, model_path: str) -> nn.Module:
        policy = self.cfg.policy
        return HFModelWrapper(
            model_path,
            use_flash_attention_2=self.cfg.flash_attn and self.rank == 0,
            remove_microbatch_padding=self.cfg.remove_microbatch_padding and self.rank == 0,
            bf16=policy.inference_only_init and self.cfg.bf16,
            temperature=self.cfg.algorithm.temperature,  # type: ignore[arg-type]  # derived: never None here
            model_config_kwargs=policy.model_config_kwargs,
            meta_init=self.rank != 0,
            logprobs_chunk_size=self.cfg.logprobs_chunk_size,
        )

    def _fsdp_config(self) -> FSDPConfig:
        return self.cfg.policy.fsdp_config

    def _optimizer_config(self) -> OptimizerConfig | None:
        return None if self.cfg.policy.inference_only_init else self.cfg.policy.optimizer_config

    def init_model(self, model_path: str, num_training_steps: int | None = None) -> None:
        """Also get ready to hand out weights; see the base class."""
        super().init_model(model_path, num_training_steps)
        self.weight_extractor = FSDPWeightExtractor(self.module.model)
        self.weight_device = device.device()

    def forward(
        self,
        data: TrainingInputBatch,
        loss_fn: str | None = None,
        loss_fn_config: Mapping[str, Any] | None = None,
        return_per_token_outputs: bool = True,
    ) -> WorkerOutput:
        """Log-probs without gradients; with ``loss_fn`` also its metrics."""
        del return_per_token_outputs  # only supervised losses leave them out
        if loss_fn is None:
            return self._forward_log_probs(data)
        with self._inference():
            return self._run_loss(data, loss_fn, loss_fn_config, train=False)

    def forward_backward(
        self,
        data: TrainingInputBatch,
        loss_fn: str | None = None,
        loss_fn_config: Mapping[str, Any] | None = None,
        return_per_token_outputs: bool = True,
    ) -> WorkerOutput:
        """Add the gradient of these rows' loss; call it once or more before `optim_step`. Collective.

        Returns:
            Metrics over all ranks, and the log-probs of this rank's rows.
        """
        del return_per_token_outputs
        self.module.train()
        output = self._run_loss(data, loss_fn, loss_fn_config, train=True)
        self.save_memory_snapshot("forward_backward")
        return output

    def _run_loss(
        self, data: TrainingInputBatch, loss_fn: str | None, overrides: Mapping[str, Any] | None, *, train: bool
    ) -> WorkerOutput:
        name, algorithm = effective_loss(self.cfg.algorithm, loss_fn, overrides)
        metrics, parts = MetricBuffer(), []
        size = self.cfg.micro_train_batch_size_per_gpu if train else self.cfg.micro_forward_batch_size_per_gpu
        for micro in self._micro_batches(data, size):
            scale = LossScale(dp_size=self.dp_size, row_share=len(micro) / len(data))
            loss, log_probs = self._micro_batch_loss(micro, name, algorithm, scale, metrics)
            if train:
                loss.backward()
            parts.append(log_probs.detach())
        numbers = finish_policy_metrics(metrics.result(self._all_reduce))
        numbers["policy_lr"] = self.get_lr() or 0.0
        lengths = data["response_mask"].sum(dim=-1).long()
        return WorkerOutput(metrics=numbers, tensors={"logprobs": torch.cat(parts).cpu()}, lengths=lengths)

    def _micro_batch_loss(
        self,
        micro: TrainingInputBatch,
        name: str,
        algorithm: AlgorithmConfig,
        scale: LossScale,
        metrics: MetricBuffer,
    ) -> tuple[Tensor, Tensor]:
        centering = algorithm.score_centering.enabled
        columns = self._columns(micro, centering=centering)
        check_columns(micro, columns, metrics)
        scores = score_response(
            self.module,
            micro,
            columns,
            self.cfg.algorithm.temperature,
            entropy=True,
            entropy_grad=algorithm.use_entropy_loss,
        )
        head = sampler_head(micro, scores.members) if centering else None
        rows = PolicyRows.from_batch(micro)
        loss = policy_loss(rows, scores.log_probs, scores.entropy, name, algorithm, scale, metrics, head=head)
        return loss, scores.log_probs


class FSDPCriticWorkerBase(FSDPWorker):
    """The value model."""

    role = "critic"

    def _build(self, model_path: str) -> nn.Module:
        return get_llm_for_sequence_regression(
            model_path,
            value_head_prefix=self.cfg.algorithm.value_head_prefix,
            init_value_head=model_path == self.cfg.policy.model.path,
            seed=self.cfg.seed,
            model_config_kwargs=self.cfg.critic.model_config_kwargs,
            meta_init=self.rank != 0,
        )

    def _fsdp_config(self) -> FSDPConfig:
        return self.cfg.critic.fsdp_config

    def _optimizer_config(self) -> OptimizerConfig | None:
        return self.cfg.critic.optimizer_config

    @property
    def checkpointed_module(self) -> nn.Module:
        """The whole critic, head included."""
        assert isinstance(self.module, CriticModel)
        return self.module

    def save_hf_model(self, export_dir: str, tokenizer: Any | None = None) -> None:
        """Export the language model with its head in ``<value_head_prefix>.safetensors``. Collective."""
        save_critic(export_dir, self.module, self._strategy.compute_dtype, tokenizer)

    def forward(self, data: TrainingInputBatch) -> WorkerOutput:
        """Values [rows, response] without gradients."""
        with self._inference():
            parts = [
                self._values(micro).cpu()
                for micro in self._micro_batches(data, self.cfg.micro_forward_batch_size_per_gpu)
            ]
        return WorkerOutput(tensors={"values": torch.cat(parts)})

    def _values(self, micro: TrainingInputBatch) -> Tensor:
        values: Tensor = self.module(micro["sequences"], micro.metadata["response_length"], micro["attention_mask"])
        return values

    def forward_backward(self, data: TrainingInputBatch) -> WorkerOutput:
        """Add the gradient of these rows' value loss. Collective."""
        self.module.train()
        metrics = MetricBuffer()
        for micro in self._micro_batches(data, self.cfg.micro_train_batch_size_per_gpu):
            loss = critic_micro_batch_loss(micro, self._values(micro), self.cfg.algorithm, metrics)
            (loss * self.dp_size).backward()
        numbers = metrics.result(self._all_reduce)
        numbers["critic_lr"] = self.get_lr() or 0.0
        self.save_memory_snapshot("forward_backward")
        return WorkerOutput(metrics=numbers)


class FSDPRefWorkerBase(FSDPWorker):
    """The frozen reference; it holds its parameters in bf16 when `trainer.bf16` is on."""

    role = "ref"

    def _build(self, model_path: str) -> nn.Module:
        return HFModelWrapper(
            model_path,
            bf16=self.cfg.bf16,
            temperature=self.cfg.algorithm.temperature,  # type: ignore[arg-type]  # derived: never None here
            model_config_kwargs=self.cfg.ref.model_config_kwargs,
            meta_init=self.rank != 0,
            logprobs_chunk_size=self.cfg.logprobs_chunk_size,
        )

    def _fsdp_config(self) -> FSDPConfig:
        return self.cfg.ref.fsdp_config

    def forward(self, data: TrainingInputBatch) -> WorkerOutput:
        """Log-probs, at the same temperature as the policy's."""
        return self._forward_log_probs(data)


PolicyWorker = ray.remote(FSDPPolicyWorkerBase)
CriticWorker = ray.remote(FSDPCriticWorkerBase)
RefWorker = ray.remote(FSDPRefWorkerBase)
