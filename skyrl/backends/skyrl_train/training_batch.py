"""The batch that travels between the trainer and its workers.

`B` rows, `S` columns of a left-padded sequence, `R` of the response (the last `R` columns).
"""

from __future__ import annotations

from typing import TypedDict

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from skyrl.backends.skyrl_train.utils.tensor_batch import TensorBatch, TensorList, assemble_batch, cat_columns

__all__ = [
    "TensorBatch",
    "TensorList",
    "TrainingInput",
    "TrainingInputBatch",
    "TrainingOutputBatch",
    "pad_training_input_batch",
]


class TrainingInput(TypedDict, total=False):
    """The columns of a training batch. Tokens are right-aligned, in the sequence and in the response."""

    sequences: Int[Tensor, "batch seq"]
    """Prompt and response ids."""
    attention_mask: Int[Tensor, "batch seq"]
    """1 = a real token."""
    response_mask: Int[Tensor, "batch response"]
    """1 = after the prompt; tool output is."""
    loss_mask: Float[Tensor, "batch response"]
    """1 = trains; tool output does not."""
    action_log_probs: Float[Tensor, "batch response"] | None
    """By the trainer before this update, in nats."""
    base_action_log_probs: Float[Tensor, "batch response"] | None
    """By the reference model, in nats."""
    rollout_logprobs: Float[Tensor, "batch response"] | None
    """By the policy that sampled, in nats."""
    values: Float[Tensor, "batch response"] | None
    """By the critic before this update."""
    rewards: Float[Tensor, "batch response"] | None
    kl: Float[Tensor, "batch response"] | None
    """The penalty that went into the rewards, per token, before its coefficient."""
    advantages: Float[Tensor, "batch response"] | None
    returns: Float[Tensor, "batch response"] | None
    loss_weights: Float[Tensor, "batch response"] | None
    """The loss reduction (`skyrl.algorithms.loss_reduction`)."""
    valid_rows: Bool[Tensor, " batch"] | None
    """False = a failed rollout or a padding row: no sample."""
    baseline_scores: Float[Tensor, " batch"] | None
    """Score of the prompt's greedy rollout; NaN = it failed."""
    reward_components: Float[Tensor, "batch rewards"] | None
    """The row's score under each of `reward_names` (metadata)."""
    rollout_expert_indices: Int[Tensor, "batch seq layers topk"] | None
    """Experts that the engine chose."""
    router_padding_mask: Bool[Tensor, "batch seq"] | None
    """True = no captured route."""
    pixel_values: TensorList | None
    image_grid_thw: TensorList | None
    sub_seq_lengths: TensorList | None
    """Lengths of the sequences packed into a row."""
    sample_support: Int[Tensor, "batch response k"] | None
    """Ids that the sampler kept, -1 padded."""
    sampler_topk_ids: Int[Tensor, "batch response k"] | None
    """The sampler's likeliest ids, -1 padded."""
    sampler_topk_logprobs: Float[Tensor, "batch response k"] | None
    """Their log-probs by the sampler, in nats, -inf padded."""


class TrainingInputBatch(TensorBatch):
    """A batch with the columns of `TrainingInput`.

    Metadata: `response_length` (R), `uids`, `is_last_step`, `avg_response_length`, `pad_size`, `is_padding_batch`.
    """


class TrainingOutputBatch(TensorBatch):
    """What a forward pass returns: per-token columns such as `output`, in the row order of the input."""


def pad_training_input_batch(unpadded_batch: TrainingInputBatch, pad_size: int) -> TrainingInputBatch:
    """Append rows that change no result, so that the row count divides among ranks.

    They repeat row 0, but `loss_mask` and `loss_weights` are 0, `valid_rows` False, routes are the neutral
    0..k-1 and counted as missing, and the sampler's sets and heads are empty. The metadata get `pad_size`, and
    entries for the new rows in `uids` and `is_last_step`.

    Returns:
        A new batch; for `pad_size=0` the same object.

    Raises:
        ValueError: `pad_size` is negative, or the batch is empty or not on the CPU.
    """
    if pad_size < 0 or (pad_size and not len(unpadded_batch)):
        raise ValueError(f"cannot add {pad_size} padding rows to a batch of {len(unpadded_batch)}")
    if pad_size == 0:
        unpadded_batch.metadata["pad_size"] = 0
        return unpadded_batch
    if unpadded_batch.device != torch.device("cpu"):
        raise ValueError(f"padding needs a batch on the CPU, this one is on {unpadded_batch.device}")
    columns = {
        key: None if value is None else cat_columns(key, [value, _padding_rows(key, value, pad_size)])
        for key, value in unpadded_batch.items()
    }
    metadata = unpadded_batch.metadata | {"pad_size": pad_size}
    if "uids" in metadata:
        metadata["uids"] = [*metadata["uids"], *(f"pad{i}" for i in range(pad_size))]
    if "is_last_step" in metadata:
        metadata["is_last_step"] = [*metadata["is_last_step"], *[True] * pad_size]
    return assemble_batch(type(unpadded_batch), columns, metadata)


def _padding_rows(key: str, column: Tensor | TensorList, pad_size: int) -> Tensor | TensorList:
    if isinstance(column, TensorList):
        return TensorList([column[0].clone() for _ in range(pad_size)])
    rows = column[:1].repeat(pad_size, *[1] * (column.ndim - 1))
    if key in {"loss_mask", "loss_weights", "valid_rows"}:
        return torch.zeros_like(rows)
    if key == "rollout_expert_indices":
        return torch.arange(rows.shape[-1], dtype=rows.dtype).expand_as(rows)
    if key == "router_padding_mask":
        return torch.ones_like(rows)
    if key in {"sample_support", "sampler_topk_ids"}:
        return torch.full_like(rows, -1)
    if key == "sampler_topk_logprobs":
        return torch.full_like(rows, -torch.inf)
    return rows
