"""What the engine recorded of its own distribution, from batch columns to what a model scores and a loss reads.

`sample_support` is used in every forward pass of policy and reference while
`trainer.algorithm.enable_sample_support_replay` is on, `sampler_topk_ids` and `sampler_topk_logprobs` in the
update while `trainer.algorithm.score_centering.enabled` is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from skyrl.algorithms.sampler_support import SUPPORT_FLAG, require_distinct, require_support, unite
from skyrl.algorithms.score_centering import SamplerHead
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.workers.metrics import MetricBuffer

HEAD_FLAG = "generator.inference_engine.enable_return_sample_support_logprobs"


class SamplerColumns(NamedTuple):
    """What a model scores besides the sampled tokens, and over which set."""

    support: Tensor | None = None
    """Ids that the sampler kept [batch, R, width], -1 pads: log-probs are normalised over them."""
    head_ids: Tensor | None = None
    """Further ids to score at each token [batch, R, head], -1 pads."""

    @classmethod
    def of(cls, batch: TrainingInputBatch, *, replay: bool, centering: bool) -> SamplerColumns:
        """Take the columns that are switched on.

        Raises:
            ValueError: The batch lacks one; names the key of the engine that returns it.
        """
        return cls(
            support=_column(batch, "sample_support", SUPPORT_FLAG) if replay else None,
            head_ids=_column(batch, "sampler_topk_ids", HEAD_FLAG) if centering else None,
        )


def _column(batch: TrainingInputBatch, key: str, flag: str) -> Tensor:
    column = batch.get(key)
    if column is None:
        raise ValueError(f"the batch has no {key}, which trainer.algorithm asks for; set {flag}=true")
    assert isinstance(column, Tensor)
    return column


def sampled_ids(batch: TrainingInputBatch) -> Tensor:
    """The response part of the sequences [batch, R]; -1 in front where the sequences are shorter than that."""
    width, ids = batch.metadata["response_length"], batch["sequences"]
    return torch.nn.functional.pad(ids, (max(0, width - ids.shape[1]), 0), value=-1)[:, -width:]


def check_columns(batch: TrainingInputBatch, columns: SamplerColumns, metrics: MetricBuffer) -> None:
    """Refuse what cannot be trained on, and count the tokens that their own set lacks.

    Raises:
        ValueError: A trained token has no set, or ids repeat.
    """
    trained = batch["loss_mask"] != 0
    if columns.support is not None:
        require_support(columns.support, batch["loss_mask"])
        require_distinct(columns.support, "sample_support")
        missed = unite(columns.support, sampled_ids(batch)).missed & trained
        metrics.add_mean("support_miss", missed.sum(), trained.sum())
    if columns.head_ids is not None:
        require_distinct(columns.head_ids, "sampler_topk_ids")


def sampler_head(batch: TrainingInputBatch, log_probs: Tensor) -> SamplerHead:
    """The sampler's head as a loss reads it; `log_probs` [batch, R, head] are the model's, with gradient."""
    return SamplerHead(
        ids=batch["sampler_topk_ids"],
        sampler_log_probs=_column(batch, "sampler_topk_logprobs", HEAD_FLAG),
        log_probs=log_probs,
        sampled_ids=sampled_ids(batch),
    )
