"""From lists of tokens to batch tensors, and where prompts and mini-batches begin and end in them.

A row is one left-padded block `[padding, prompt, response]`; response tensors are right-aligned in the width
of the longest response.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from skyrl.errors import ConfigError

logger = logging.getLogger(__name__)

TokenRows = Sequence[Sequence[int] | np.ndarray]
FloatRows = Sequence[Sequence[float] | np.ndarray | Tensor]

BatchTensors = tuple[
    Int[Tensor, "batch seq"],
    Int[Tensor, "batch seq"],
    Int[Tensor, "batch response"],
    Float[Tensor, "batch response"],
    Float[Tensor, "batch response"],
    Float[Tensor, "batch response"] | None,
    None,
]


def convert_prompts_responses_to_batch_tensors(
    pad_token_id: int,
    prompts: TokenRows,
    responses: TokenRows,
    rewards: FloatRows,
    loss_masks: Sequence[Sequence[int] | np.ndarray],
    logprobs: FloatRows | None = None,
    rollout_expert_indices: Sequence[np.ndarray] | None = None,
    max_seq_len: int | None = None,
) -> BatchTensors:
    """Make the tensors of a batch from one list a row.

    Example: prompts `[[1, 2], [3]]`, responses `[[4], [5, 6, 7]]`, pad 0 give sequences
    `[[0, 1, 2, 4], [3, 5, 6, 7]]` and a response mask `[[0, 0, 1], [1, 1, 1]]`.

    Args:
        pad_token_id: Fills the left of `sequences`.
        prompts: Token ids.
        responses: Token ids, observations included.
        rewards: Per token of the response.
        loss_masks: Per token of the response; 1 = trains.
        logprobs: Per token of the response, in nats; None when there are none.
        rollout_expert_indices: Must be None.
        max_seq_len: Longer rows only cause a warning.

    Returns:
        `(sequences, attention_mask, response_mask, rewards, loss_masks, logprobs or None, None)`: ids and the
        first two masks int64, the rest float32.

    Raises:
        AssertionError: There is no row or no response token, or lengths disagree; the text names the row.
        ConfigError: Expert routes are given.
    """
    if rollout_expert_indices is not None:
        raise ConfigError(
            "rollout_expert_indices cannot be trained on yet; set "
            "generator.inference_engine.enable_return_routed_experts=false"
        )
    lengths, response_lens = _row_lengths(prompts, responses, max_seq_len)
    blocks = [part for pair in zip(prompts, responses, strict=True) for part in pair]
    attention_mask = _right_aligned(lengths, int(lengths.max()))
    response_mask = _right_aligned(response_lens, int(response_lens.max()))
    sequences = _place(blocks, attention_mask, np.int64, fill=pad_token_id)
    per_token = {"rewards": rewards, "loss_masks": loss_masks, "logprobs": logprobs}
    placed = {
        name: _place(_checked(name, rows, response_lens), response_mask, np.float32)
        for name, rows in per_token.items()
        if rows is not None
    }
    return (
        sequences,
        torch.from_numpy(attention_mask).long(),
        torch.from_numpy(response_mask).long(),
        placed["rewards"],
        placed["loss_masks"],
        placed.get("logprobs"),
        None,
    )


def _row_lengths(prompts: TokenRows, responses: TokenRows, max_seq_len: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of each row and of its response; rows beyond max_seq_len cause a warning."""
    _require(len(prompts) > 0, "a batch needs at least one prompt")
    _require(len(prompts) == len(responses), f"{len(prompts)} prompts but {len(responses)} responses")
    response_lens = np.array([len(row) for row in responses], dtype=np.int64)
    lengths = response_lens + np.array([len(row) for row in prompts], dtype=np.int64)
    width = int(lengths.max())
    _require(int(response_lens.max()) > 0, "no row of the batch has a response token")
    if max_seq_len is not None and width > max_seq_len:
        logger.warning(
            "The longest row has %d tokens, more than max_seq_len=%d; %d rows are longer",
            width, max_seq_len, int((lengths > max_seq_len).sum()),
        )  # fmt: skip
    return lengths, response_lens


def _right_aligned(lengths: np.ndarray, width: int) -> np.ndarray:
    """Return a (rows, width) mask whose last `length` columns are true."""
    return np.arange(width) >= (width - lengths)[:, None]


def _place(rows: Sequence[Any], mask: np.ndarray, dtype: type[np.generic], fill: int = 0) -> Tensor:
    """Put the concatenated rows where the mask is true; it runs in row order, as they do."""
    placed = np.full(mask.shape, fill, dtype=dtype)
    placed[mask] = np.concatenate([np.asarray(row, dtype=dtype) for row in rows])
    return torch.from_numpy(placed)


def _checked(name: str, rows: Sequence[Any], lengths: np.ndarray) -> Sequence[Any]:
    _require(len(rows) == len(lengths), f"{name} has {len(rows)} rows but there are {len(lengths)} responses")
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        _require(
            np.ndim(row) == 1, f"{name} of row {i} must be a list with one value a token, got {type(row).__name__}"
        )
        _require(len(row) == length, f"{name} of row {i} has {len(row)} values but its response has {length} tokens")
    return rows


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def compute_prompt_boundaries(uids: Sequence[str]) -> list[tuple[int, int]]:
    """Return the rows `[start, end)` of each prompt: runs of equal uids.

    Raises:
        AssertionError: A uid comes back after another one.
    """
    boundaries: list[tuple[int, int]] = []
    seen: set[str] = set()
    start = 0
    for uid, run in groupby(uids):
        _require(uid not in seen, f"rows of uid {uid!r} must stand together, but it comes back at row {start}")
        seen.add(uid)
        end = start + sum(1 for _ in run)
        boundaries.append((start, end))
        start = end
    return boundaries


def compute_prompt_mini_batch_boundaries(
    uids: Sequence[str],
    mini_batch_size: int,
    train_batch_size: int,
    is_stepwise: bool,
    n_samples_per_prompt: int,
) -> list[tuple[int, int]]:
    """Return the rows `[start, end)` of each mini-batch of `mini_batch_size` prompts.

    Args:
        uids: The prompt of each row.
        mini_batch_size: Prompts in a mini-batch.
        train_batch_size: Prompts that the batch must hold.
        is_stepwise: A rollout may have several rows, so that the row count of a prompt is free.
        n_samples_per_prompt: Rows of a prompt otherwise.

    Raises:
        AssertionError: The counts do not fit.
    """
    prompts = compute_prompt_boundaries(uids)
    _require(
        len(prompts) == train_batch_size,
        f"the batch holds {len(prompts)} prompts but trainer.train_batch_size={train_batch_size}",
    )
    _require(
        mini_batch_size > 0 and train_batch_size % mini_batch_size == 0,
        f"mini-batches of {mini_batch_size} prompts do not divide trainer.train_batch_size={train_batch_size}",
    )
    boundaries = [
        (prompts[first][0], prompts[first + mini_batch_size - 1][1])
        for first in range(0, train_batch_size, mini_batch_size)
    ]
    rows = mini_batch_size * n_samples_per_prompt
    for start, end in boundaries:
        _require(
            is_stepwise or end - start == rows,
            f"the mini-batch at row {start} has {end - start} rows, not {mini_batch_size} prompts x "
            f"{n_samples_per_prompt} samples = {rows}",
        )
    return boundaries
