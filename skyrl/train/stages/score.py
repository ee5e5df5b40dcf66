"""Score stage: log-probs of the policy before the update, of the reference, and the critic's values."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl.algorithms.logprob_gap import logprob_gap
from skyrl.algorithms.policy_losses import reads_old_log_probs
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.workers.dispatch import WorkerDispatch
from skyrl.config.trainer import TrainerConfig

CRITIC_INPUTS = ("sequences", "attention_mask", "response_mask")
POLICY_INPUTS = (*CRITIC_INPUTS, "sample_support")
Boundaries = list[tuple[int, int]]


class ScoreStage:
    """Adds `values`, `base_action_log_probs` and `action_log_probs`, each [batch, response], to a batch."""

    def __init__(self, dispatch: WorkerDispatch, cfg: TrainerConfig, *, has_critic: bool, has_ref: bool) -> None:
        self._dispatch = dispatch
        self._cfg = cfg
        self._has_critic = has_critic
        self._has_ref = has_ref

    def run(self, batch: TrainingInputBatch) -> tuple[TrainingInputBatch, dict[str, float]]:
        """Run the forward passes that the algorithm needs; every key it adds is float32 on the CPU."""
        if self._has_critic:
            boundaries = batch.metadata.get("critic_mini_batch_boundaries")
            batch["values"] = self._forward("critic", _select(batch, CRITIC_INPUTS), boundaries)
        inputs = _select(batch, POLICY_INPUTS)
        if self._has_ref:
            batch["base_action_log_probs"] = self._dispatch.forward("ref", inputs).tensors["logprobs"]
            self._dispatch.empty_cache("ref")
        batch.metadata["old_is_current"] = self._old_is_current(batch)
        if not batch.metadata["old_is_current"] and self._needs_old_log_probs(batch):
            boundaries = batch.metadata.get("policy_mini_batch_boundaries")
            batch["action_log_probs"] = self._forward("policy", inputs, boundaries)
        old, sampled = batch.get("action_log_probs"), batch.get("rollout_logprobs")
        if old is None or sampled is None:
            return batch, {}
        return batch, logprob_gap(old, sampled, batch["loss_mask"])

    def _old_is_current(self, batch: TrainingInputBatch) -> bool:
        """Whether these rollouts give one optimizer step: its own forward pass then yields the old log-probs."""
        steps = len(batch.metadata["policy_mini_batch_boundaries"]) * self._cfg.update_epochs_per_batch
        return steps == 1 and not self._cfg.algorithm.use_kl_in_reward

    def _needs_old_log_probs(self, batch: TrainingInputBatch) -> bool:
        """Losses anchored on the sampler's log-probs read no old ones, unless KL goes into the reward."""
        if batch.get("rollout_logprobs") is None or self._cfg.algorithm.use_kl_in_reward:
            return True
        return reads_old_log_probs(self._cfg.algorithm)

    def _forward(self, model: str, inputs: TrainingInputBatch, boundaries: Boundaries | None) -> Tensor:
        """Forward with the mini-batch partition of the update, so that the same rows meet the same padding."""
        key = "values" if model == "critic" else "logprobs"
        if not boundaries or not self._cfg.recompute_old_logprobs_per_minibatch:
            return self._dispatch.forward(model, inputs).tensors[key]
        staged = self._dispatch.stage_data(model, inputs, boundaries)
        parts = []
        for (start, end), refs in zip(boundaries, staged, strict=True):
            rows = self._dispatch.forward_from_staged(model, refs).tensors[key]
            parts.append(rows[: end - start])
        done = boundaries[-1][1]
        if done < len(inputs):  # rows that pad the batch to the data-parallel size train nothing
            parts.append(torch.zeros(len(inputs) - done, parts[0].shape[1], dtype=parts[0].dtype))
        return torch.cat(parts)


def _select(batch: TrainingInputBatch, keys: tuple[str, ...]) -> TrainingInputBatch:
    return batch.select([key for key in keys if batch.get(key) is not None], ["response_length"])
