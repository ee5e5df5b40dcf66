"""Cut a rank's rows into micro-batches, and drop the padding that a micro-batch does not need."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.errors import ConfigError

SEQUENCE_KEYS = ("sequences", "attention_mask")


def get_microbatch_iterator(
    data: TrainingInputBatch, micro_batch_size: int, max_tokens_per_microbatch: int = -1
) -> Iterator[TrainingInputBatch]:
    """Consecutive chunks of ``micro_batch_size`` rows; the last may be short. Left padding common to a chunk goes.

    Raises:
        ConfigError: A token budget is asked for; it is not built yet.
    """
    if max_tokens_per_microbatch > 0:
        raise ConfigError(
            f"trainer.max_tokens_per_microbatch={max_tokens_per_microbatch} is not built yet; use -1 and "
            "trainer.micro_train_batch_size_per_gpu"
        )
    for chunk in data.chunk(micro_batch_size):
        yield trim_left_padding(chunk)


def trim_left_padding(batch: TrainingInputBatch) -> TrainingInputBatch:
    """Drop the leading sequence columns in which no row has a token. Response tensors keep their width."""
    mask: Tensor = batch["attention_mask"]
    used = mask.any(dim=0).nonzero()
    start = int(used[0].item()) if len(used) else 0
    if start == 0:
        return batch
    trimmed = batch[0 : len(batch)]
    for key in SEQUENCE_KEYS:
        trimmed[key] = batch[key][:, start:].contiguous()
    return trimmed
