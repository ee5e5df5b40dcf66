"""How the losses of tokens become the loss of a mini-batch.

One formula serves every policy loss, the critic, KL and entropy:

    loss = Σ w·m·L,   w = 1 / (units · size of the row's unit)

Rows are gathered in units, and a unit's size is the number of its trained tokens (Σ m, at least 1):

| reduction | units of a mini-batch | size |
|---|---|---|
| `token_mean` | one: all rows | Σ m |
| `sequence_mean` | each row | Σ m |
| `prompt_mean` | the rows of each prompt | Σ m |
| `token_mean_legacy` | runs of `micro_batch_size` rows | Σ m |
| `seq_mean_token_sum_norm` | each row | `max_seq_len` |

The weights belong to the mini-batch, before it is cut into micro-batches and ranks: the sum of the parts is
the loss, however it was cut (`token_mean_legacy` excepted, whose units are a cut).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from skyrl.algorithms.groups import group_index, group_sum
from skyrl.config.rules.choices import require_choice
from skyrl.errors import ConfigError

LOSS_REDUCTIONS = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean", "token_mean_legacy")
"""Values of `trainer.algorithm.loss_reduction`."""


def compute_loss_weights(
    loss_mask: Shaped[Tensor, "batch response"],
    reduction: str,
    *,
    uids: Sequence[str] | np.ndarray | None = None,
    max_seq_len: int | None = None,
    micro_batch_size: int | None = None,
) -> Float[Tensor, "batch response"]:
    """Return w for all tokens of one mini-batch, so that Σ w·m·L is its loss.

    Rows without a trained token count as rows: they are part of b in `sequence_mean`.

    Args:
        loss_mask: 1 = trains. All rows of the mini-batch, over all ranks, without padding rows.
        reduction: One of `LOSS_REDUCTIONS`.
        uids: The prompt of each row; `prompt_mean` needs them.
        max_seq_len: The divisor of `seq_mean_token_sum_norm`, in tokens.
        micro_batch_size: Rows in a unit of `token_mean_legacy`; the last one may be shorter.

    Raises:
        ConfigError: The name is unknown, or what it needs is missing.
        ValueError: The mask has another number of dimensions than two.
    """
    if loss_mask.dim() != 2:
        raise ValueError(f"loss_mask has shape {tuple(loss_mask.shape)}; it must be (batch, response)")
    require_choice("trainer.algorithm.loss_reduction", reduction, LOSS_REDUCTIONS)
    rows = loss_mask.shape[0]
    tokens = loss_mask.sum(dim=1, dtype=torch.float64)
    if reduction == "seq_mean_token_sum_norm":
        size = torch.full_like(tokens, _need(max_seq_len, "max_seq_len", reduction))
        units = rows
    else:
        unit_of_row, units = _units(rows, reduction, uids=uids, micro_batch_size=micro_batch_size)
        unit_of_row = unit_of_row.to(tokens.device)
        size = group_sum(tokens, unit_of_row, units).clamp(min=1.0)[unit_of_row]
    weights = (1.0 / (units * size)).float()
    return weights.unsqueeze(1).expand(loss_mask.shape).contiguous()


def _units(
    rows: int, reduction: str, *, uids: Sequence[str] | np.ndarray | None, micro_batch_size: int | None
) -> tuple[Int[Tensor, " batch"], int]:
    """Return the unit of each row and the number of units."""
    if reduction == "token_mean":
        return torch.zeros(rows, dtype=torch.int64), 1
    if reduction == "sequence_mean":
        return torch.arange(rows), rows
    if reduction == "token_mean_legacy":
        size = _need(micro_batch_size, "micro_train_batch_size_per_gpu", reduction)
        return torch.arange(rows) // size, -(-rows // size)
    if uids is None or len(uids) != rows:
        raise ConfigError(
            f"loss reduction prompt_mean needs the uid of each of the {rows} rows of a mini-batch, "
            f"got {'none' if uids is None else len(uids)}"
        )
    return group_index(uids)


def _need(value: int | None, name: str, reduction: str) -> int:
    if value is None or value <= 0:
        raise ConfigError(f"loss reduction {reduction} needs a positive {name}, got {value}")
    return value


def apply_loss_reduction_to_advantages_minibatch(
    advantages: Float[Tensor, "batch response"],
    loss_mask: Shaped[Tensor, "batch response"],
    loss_reduction: str,
    micro_batch_size: int | None = None,
    max_seq_len: int | None = None,
    uids: Sequence[str] | np.ndarray | None = None,
) -> Float[Tensor, "batch response"]:
    """Scale advantages by the weights of the reduction, so that a plain masked sum of a ratio loss is reduced.

    Upstream's way, kept for user code and for custom losses that take no `loss_weights`; the trainer itself
    leaves advantages as they are.
    """
    weights = compute_loss_weights(
        loss_mask, loss_reduction, uids=uids, max_seq_len=max_seq_len, micro_batch_size=micro_batch_size
    )
    return advantages * weights
