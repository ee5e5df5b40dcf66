"""Update stage: optimizer steps of the critic and the policy over the mini-batches of one batch."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict

import torch
from torch import Tensor

from skyrl.algorithms.logprob_gap import logprob_gap
from skyrl.algorithms.loss_reduction import compute_loss_weights
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.workers.dispatch import WorkerDispatch
from skyrl.backends.skyrl_train.workers.metrics import finish_moments, reduce_metrics
from skyrl.config.trainer import TrainerConfig
from skyrl.utils.timing import Timer

logger = logging.getLogger(__name__)

POLICY_KEYS = (
    "sequences",
    "attention_mask",
    "response_mask",
    "loss_mask",
    "loss_weights",
    "valid_rows",
    "rollout_logprobs",
    "action_log_probs",
    "base_action_log_probs",
    "advantages",
    "sample_support",
    "sampler_topk_ids",
    "sampler_topk_logprobs",
)
CRITIC_KEYS = (
    "sequences",
    "attention_mask",
    "response_mask",
    "loss_mask",
    "loss_weights",
    "valid_rows",
    "values",
    "returns",
)


class UpdateStage:
    """Trains the critic, then the policy, `update_epochs_per_batch` times over their mini-batches."""

    def __init__(self, dispatch: WorkerDispatch, cfg: TrainerConfig, *, has_critic: bool) -> None:
        self._dispatch = dispatch
        self._cfg = cfg
        self._has_critic = has_critic
        self.first_step_at: float | None = None
        """Unix time at which the policy's first optimizer step was done."""

    def run(self, batch: TrainingInputBatch, timings: dict[str, float]) -> dict[str, float]:
        """Take every optimizer step of this batch; returns `policy/*` and `critic/*`."""
        metrics: dict[str, float] = {}
        if self._has_critic:
            with Timer("critic_train", timings):
                status, _ = self._train("critic", batch, CRITIC_KEYS)
            metrics |= {f"critic/{key}": value for key, value in status.items()}
        with Timer("policy_train", timings):
            status, first = self._train("policy", batch, POLICY_KEYS)
        metrics |= {f"policy/{key}": value for key, value in status.items()}
        return metrics | gap_of_first_step(batch, first.get("logprobs"))

    def _train(
        self, model: str, batch: TrainingInputBatch, keys: tuple[str, ...]
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Return the metrics over all steps, and the tensors of the first one, before any weight has changed."""
        boundaries = batch.metadata[f"{model}_mini_batch_boundaries"]
        batch["loss_weights"] = mini_batch_loss_weights(batch, boundaries, self._cfg, model)
        present = [key for key in keys if batch.get(key) is not None]
        data = batch.select(present, ["response_length", "old_is_current"])
        staged = self._dispatch.stage_data(model, data, boundaries)
        seen: dict[str, list[float]] = defaultdict(list)
        first: dict[str, Tensor] | None = None
        for _ in range(self._cfg.update_epochs_per_batch):
            for refs in staged:
                output = self._dispatch.forward_backward_from_staged(model, refs)
                first = output.tensors if first is None else first
                status = dict(output.metrics) | self._step(model)
                for key, value in status.items():
                    seen[key].append(float(value))
        return finish_moments(reduce_metrics(seen)), first or {}

    def _step(self, model: str) -> dict[str, float]:
        norm = self._dispatch.optim_step(model)
        if model == "policy" and self.first_step_at is None:
            self.first_step_at = time.time()
        return {"grad_norm": norm, "grad_skipped": float(not math.isfinite(norm))}


def mini_batch_loss_weights(
    batch: TrainingInputBatch, boundaries: list[tuple[int, int]], cfg: TrainerConfig, model: str
) -> torch.Tensor:
    """Weights [batch, response] with which the masked token losses of each mini-batch sum to its loss.

    The critic's loss is the mean over rows of their token means, whatever the policy's reduction is.
    Rows outside every mini-batch get zero.
    """
    algorithm = cfg.algorithm
    reduction = "sequence_mean" if model == "critic" else algorithm.loss_reduction
    weights = torch.zeros_like(batch["loss_mask"], dtype=torch.float32)
    uids = batch.metadata["uids"]
    for start, end in boundaries:
        weights[start:end] = compute_loss_weights(
            batch["loss_mask"][start:end],
            reduction,
            uids=uids[start:end],
            max_seq_len=algorithm.max_seq_len,
            micro_batch_size=cfg.micro_train_batch_size_per_gpu,
        )
    return weights


def gap_of_first_step(batch: TrainingInputBatch, log_probs: Tensor | None) -> dict[str, float]:
    """Measure the score stage's log-prob gap where that stage had no forward pass of the old policy.

    The model of the first optimizer step is the old policy, so its log-probs are the old ones: of all rows where
    it is the only step, else of the rows of its mini-batch.
    """
    sampled = batch.get("rollout_logprobs")
    if log_probs is None or sampled is None or batch.get("action_log_probs") is not None:
        return {}
    start, end = batch.metadata["policy_mini_batch_boundaries"][0]
    return logprob_gap(log_probs[: end - start], sampled[start:end], batch["loss_mask"][start:end])
