"""A dispatch without actors: it remembers its calls and answers with numbers that a test can work out."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from skyrl.backends.skyrl_train.distributed.dispatch import Boundaries, WorkerOutput, split_batch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch, pad_training_input_batch

SCORES = {"policy": ("logprobs", -1.0), "ref": ("logprobs", -1.5), "critic": ("values", 0.5)}
"""What every token of a forward pass gets."""


@dataclass
class FakeWorkerDispatch:
    """Stands in for `WorkerDispatch` in the controller's stages."""

    dp_sizes: dict[str, int] = field(default_factory=lambda: {"policy": 1})
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """`(method, role)` in order; pass a list in to share it with other fakes."""
    scored: list[tuple[str, TrainingInputBatch]] = field(default_factory=list)
    """Rows of every forward pass, padding included."""
    trained: list[tuple[str, TrainingInputBatch]] = field(default_factory=list)
    """Rows of every forward and backward pass, padding included."""
    train_metrics: list[dict[str, float]] = field(default_factory=lambda: [{"final_loss": 0.25}])
    """Metrics of the forward and backward passes, in turn."""
    grad_norms: list[float] = field(default_factory=lambda: [1.0])
    """Norms of the optimizer steps, in turn."""
    fails_at: str | None = None
    """Method that raises."""
    engines_share_devices: bool = False
    version: int = 0
    loaded: list[str] = field(default_factory=list)

    def _note(self, method: str, role: Any = None) -> None:
        self.calls.append((method, role))
        if method == self.fails_at:
            raise RuntimeError(f"{method} failed")

    def count(self, method: str) -> int:
        """How often a method was called."""
        return sum(name == method for name, _ in self.calls)

    def get_lcm_dp_size(self) -> int:
        return math.lcm(*self.dp_sizes.values())

    # -- compute

    def forward(self, model: str, data: TrainingInputBatch) -> WorkerOutput:
        self._note("forward", model)
        return self._score(model, data)

    def stage_data(self, model: str, data: TrainingInputBatch, boundaries: Boundaries) -> list[list[Any]]:
        self._note("stage_data", model)
        size, staged = self.dp_sizes[model], []
        for start, end in boundaries:
            rows = data[start:end]
            staged.append(split_batch(pad_training_input_batch(rows, -len(rows) % size), size))
        return staged

    def forward_from_staged(self, model: str, chunk_refs: Sequence[TrainingInputBatch]) -> WorkerOutput:
        self._note("forward_from_staged", model)
        return self._score(model, TrainingInputBatch.cat(list(chunk_refs)))

    def _score(self, model: str, data: TrainingInputBatch) -> WorkerOutput:
        self.scored.append((model, data))
        return WorkerOutput(tensors=_scores(model, data))

    def forward_backward_from_staged(self, model: str, chunk_refs: Sequence[TrainingInputBatch]) -> WorkerOutput:
        self._note("forward_backward_from_staged", model)
        metrics = self.train_metrics[len(self.trained) % len(self.train_metrics)]
        data = TrainingInputBatch.cat(list(chunk_refs))
        self.trained.append((model, data))
        return WorkerOutput(metrics=dict(metrics), tensors=_scores(model, data))

    def optim_step(self, model: str) -> float:
        self._note("optim_step", model)
        return self.grad_norms[(self.count("optim_step") - 1) % len(self.grad_norms)]

    def empty_cache(self, model: str | None = None) -> None:
        self._note("empty_cache", model)

    def copy_policy_to_ref(self) -> None:
        self._note("copy_policy_to_ref")

    # -- files

    def save_checkpoint(self, model: str, ckpt_dir: str, tokenizer: Any = None) -> None:
        self._note("save_checkpoint", model)
        os.makedirs(ckpt_dir)
        with open(os.path.join(ckpt_dir, "weights"), "w") as file:
            file.write(model)

    def load_checkpoint(self, model: str, ckpt_dir: str) -> None:
        self._note("load_checkpoint", model)
        with open(os.path.join(ckpt_dir, "weights")) as file:
            self.loaded.append(file.read())

    def save_hf_model(self, model: str, export_dir: str, tokenizer: Any = None) -> None:
        self._note("save_hf_model", (model, export_dir))

    def finalize_pending_saves(self, model: str) -> None:
        self._note("finalize_pending_saves", model)

    # -- weight sync

    async def init_weight_sync_state(self, client: Any = None) -> None:
        self._note("init_weight_sync_state")

    async def save_weights_for_sampler(self) -> dict[str, float]:
        self._note("save_weights_for_sampler")
        self.version += 1
        return {"weight_sync/version": float(self.version)}


def _scores(model: str, data: TrainingInputBatch) -> dict[str, torch.Tensor]:
    key, value = SCORES[model]
    return {key: torch.full(data["response_mask"].shape, value)}


@dataclass
class FakeModelGroups:
    """Actor groups that are already there, as `RayPPOTrainer.attach_models` and `BasePPOExp` take them."""

    dispatch: FakeWorkerDispatch
    policy: Any = "policy group"
    critic: Any = None
    ref: Any = None
    shut_down: bool = False

    def load(self, cfg: Any, total_training_steps: int | None, client: Any = None) -> FakeWorkerDispatch:
        self.dispatch.calls.append(("load", total_training_steps))
        return self.dispatch

    def shutdown(self) -> None:
        self.shut_down = True
