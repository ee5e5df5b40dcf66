"""From rollouts to a training batch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from skyrl.algorithms.off_policy import is_active
from skyrl.algorithms.policy_losses.registry import PolicyLossRegistry, holds
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.errors import ConfigError
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.train.generators.base import GeneratorOutput
from skyrl.types.rollout import classify_stop_reason


def assemble(
    output: GeneratorOutput, uids: Sequence[str], *, pad_token_id: int, max_seq_len: int | None = None
) -> TrainingInputBatch:
    """Put rollouts into the columns of a training batch.

    A failed rollout keeps its row, for mini-batches have a fixed row count, but it is no sample: `valid_rows`
    is False there, its loss mask and its rewards are 0.

    Args:
        output: Rows in the order of `uids`.
        uids: The prompt of each row.
        pad_token_id: Fills the left of the sequences.
        max_seq_len: Longer rows only cause a warning.

    Returns:
        A batch on the CPU, without rows for divisibility. Columns `sequences`, `attention_mask`,
        `response_mask`, `rewards`, `loss_mask`, `valid_rows`, and, if there are any, `rollout_logprobs`,
        `baseline_scores` [batch] and `reward_components` [batch, name]; metadata `uids`, `response_length`,
        `avg_response_length` (tokens, over all rows), and, if there are any, `is_last_step` and `reward_names`,
        the names of the components.

    Raises:
        AssertionError: Lengths disagree; the text names the field and the row.
        ConfigError: The rows carry expert routes or images.
    """
    if output.get("pixel_values") is not None:
        raise ConfigError("rollouts with images cannot be trained on yet; use a text-only model and dataset")
    responses = output["response_ids"]
    if len(uids) != len(responses):
        raise AssertionError(f"{len(uids)} uids but {len(responses)} rollouts")
    valid_rows = _valid_rows(output, len(responses))
    batch = _columns(output, valid_rows, pad_token_id, max_seq_len)
    batch.metadata = {
        "uids": list(uids),
        "response_length": batch["response_mask"].shape[1],
        "avg_response_length": sum(map(len, responses)) / len(responses),
    }
    is_last_step = output.get("is_last_step")
    if is_last_step is not None:
        batch.metadata["is_last_step"] = list(is_last_step)
    _add_row_scores(batch, output)
    return batch


def require_rollout_logprobs(batch: TrainingInputBatch, algorithm: AlgorithmConfig) -> None:
    """Refuse a batch without the sampler's log-probs, before any forward pass, if the learning rule reads them.

    Raises:
        ConfigError: Names the setting that does; the generator returned no `rollout_logprobs`.
    """
    if batch.get("rollout_logprobs") is not None:
        return
    name = algorithm.policy_loss_type
    needs = {
        "off_policy_correction": is_active(algorithm.off_policy_correction),
        f"policy_loss_type={name}": holds(PolicyLossRegistry.traits(name).needs_rollout_logprobs, algorithm),
        "score_centering.enabled=true": algorithm.score_centering.enabled,
    }
    for setting, reads in needs.items():
        if reads:
            raise ConfigError(
                f"trainer.algorithm.{setting} needs the sampler's log-probs, but the generator returned no "
                "rollout_logprobs; set generator.sampling_params.logprobs=1 and let a generator of your own return them"
            )


def _add_row_scores(batch: TrainingInputBatch, output: GeneratorOutput) -> None:
    """Add what estimators read besides the rewards, one number a row; a failed row's components are 0."""
    baselines, parts = output.get("baseline_scores"), output.get("reward_components")
    if baselines is not None:
        batch["baseline_scores"] = torch.tensor(baselines, dtype=torch.float32)
    if parts:
        columns = torch.tensor(np.array(list(parts.values())), dtype=torch.float32).T.contiguous()
        batch["reward_components"] = torch.where(batch["valid_rows"].unsqueeze(1), columns, 0.0)
        batch.metadata["reward_names"] = list(parts)


def _columns(
    output: GeneratorOutput, valid_rows: torch.Tensor, pad_token_id: int, max_seq_len: int | None
) -> TrainingInputBatch:
    """Make the tensors of a batch; a failed row's rewards and loss mask are 0."""
    responses = output["response_ids"]
    sequences, attention_mask, response_mask, rewards, loss_mask, logprobs, _ = (
        convert_prompts_responses_to_batch_tensors(
            pad_token_id,
            output["prompt_token_ids"],
            responses,
            token_level_rewards(output["rewards"], responses),
            output["loss_masks"],
            output.get("rollout_logprobs"),
            output.get("rollout_expert_indices"),
            max_seq_len,
        )
    )
    batch = TrainingInputBatch(
        {
            "sequences": sequences,
            "attention_mask": attention_mask,
            "response_mask": response_mask,
            "rewards": torch.where(valid_rows.unsqueeze(1), rewards, 0.0),
            "loss_mask": torch.where(valid_rows.unsqueeze(1), loss_mask, 0.0),
            "valid_rows": valid_rows,
        }
    )
    if logprobs is not None:
        batch["rollout_logprobs"] = logprobs
    return batch


def token_level_rewards(rewards: Sequence[Any], responses: Sequence[Any]) -> list[Any]:
    """Return rewards per token: a row's single reward goes to its last response token.

    A row without response tokens has no place for a reward and gets an empty list.
    """
    return [_on_last_token(reward, len(response)) for reward, response in zip(rewards, responses, strict=True)]


def _on_last_token(reward: Any, length: int) -> Any:
    if np.ndim(reward) > 0:
        return reward
    placed = np.zeros(length, dtype=np.float32)
    placed[length - 1 :] = reward
    return placed


def _valid_rows(output: GeneratorOutput, rows: int) -> torch.Tensor:
    reasons = output.get("stop_reasons")
    if reasons is None:
        return torch.ones(rows, dtype=torch.bool)
    if len(reasons) != rows:
        raise AssertionError(f"{len(reasons)} stop reasons but {rows} rollouts")
    return torch.tensor([classify_stop_reason(reason) != "failed" for reason in reasons], dtype=torch.bool)
