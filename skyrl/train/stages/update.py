"""Update stage: optimizer steps of the critic and the policy over the mini-batches of one batch."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict

import torch

from skyrl.algorithms.loss_reduction import compute_loss_weights
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.workers.dispatch import WorkerDispatch
from skyrl.backends.skyrl_train.workers.metrics import reduce_metrics
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
                status = self._train("critic", batch, CRITIC_KEYS)
            metrics |= {f"critic/{key}": value for key, value in status.items()}
        with Timer("policy_train", timings):
            status = self._train("policy", batch, POLICY_KEYS)
        metrics |= {f"policy/{key}": value for key, value in status.items()}
        if batch.metadata["old_is_current"]:
            metrics |= old_gap_from_update(status)
        return metrics

    def _train(self, model: str, batch: TrainingInputBatch, keys: tuple[str, ...]) -> dict[str, float]:
        boundaries = batch.metadata[f"{model}_mini_batch_boundaries"]
        batch["loss_weights"] = mini_batch_loss_weights(batch, boundaries, self._cfg, model)
        present = [key for key in keys if batch.get(key) is not None]
        data = batch.select(present, ["response_length", "old_is_current"])
        staged = self._dispatch.stage_data(model, data, boundaries)
        seen: dict[str, list[float]] = defaultdict(list)
        for _ in range(self._cfg.update_epochs_per_batch):
            for refs in staged:
                output = self._dispatch.forward_backward_from_staged(model, refs)
                status = dict(output.metrics) | self._step(model)
                for key, value in status.items():
                    seen[key].append(float(value))
        return reduce_steps(seen)

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


def old_gap_from_update(status: dict[str, float]) -> dict[str, float]:
    """Name the update's log-prob gap as the score stage would, where the old policy is the one that was updated."""
    old, now = "policy/rollout_train_logprobs_abs_diff", "minibatch_rollout_logprobs_abs_diff"
    found = {name: status.get(f"{now}_{name}") for name in ("max", "min", "mean", "std")}
    return {f"{old}_{name}": value for name, value in found.items() if value is not None}


def reduce_steps(seen: dict[str, list[float]]) -> dict[str, float]:
    """Reduce metrics over optimizer steps as `reduce_metrics` does.

    The standard deviation of the log-prob gap comes from its first two moments.
    """
    reduced = reduce_metrics(seen)
    gap = "minibatch_rollout_logprobs_abs_diff"
    square = reduced.pop(f"{gap}_sq_mean", None)
    if square is not None:
        reduced[f"{gap}_std"] = max(0.0, square - reduced[f"{gap}_mean"] ** 2) ** 0.5
    return reduced
