from __future__ import annotations

import pytest
import torch

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.workers.metrics import MetricBuffer
from skyrl.backends.skyrl_train.workers.sampler_columns import (
    SamplerColumns,
    check_columns,
    sampled_ids,
    sampler_head,
)


def make() -> TrainingInputBatch:
    """Two rows; the second has a prompt of one token, and its first response column is empty."""
    return TrainingInputBatch(
        {
            "sequences": torch.tensor([[7, 8, 9], [0, 5, 6]]),
            "loss_mask": torch.tensor([[1.0, 1.0], [0.0, 1.0]]),
            "sample_support": torch.tensor([[[8, 3], [4, 5]], [[-1, -1], [6, -1]]], dtype=torch.int32),
            "sampler_topk_ids": torch.tensor([[[8], [4]], [[-1], [6]]], dtype=torch.int32),
            "sampler_topk_logprobs": torch.tensor([[[-0.5], [-0.7]], [[-torch.inf], [-0.1]]]),
        },
        {"response_length": 2},
    )


def numbers(metrics: MetricBuffer) -> dict[str, float]:
    return metrics.result(lambda values, op: values)


def test_only_what_is_switched_on_is_taken() -> None:
    batch = make()
    assert SamplerColumns.of(batch, replay=False, centering=False) == (None, None)
    columns = SamplerColumns.of(batch, replay=True, centering=True)
    assert columns.support is batch["sample_support"]
    assert columns.head_ids is batch["sampler_topk_ids"]


def test_a_missing_column_names_the_engines_key() -> None:
    batch = make()
    batch["sample_support"] = None
    with pytest.raises(ValueError, match=r"no sample_support.*enable_return_sample_support_set=true"):
        SamplerColumns.of(batch, replay=True, centering=False)
    batch["sampler_topk_ids"] = None
    with pytest.raises(ValueError, match=r"no sampler_topk_ids.*enable_return_sample_support_logprobs=true"):
        SamplerColumns.of(batch, replay=False, centering=True)
    half = make()
    half["sampler_topk_logprobs"] = None
    with pytest.raises(ValueError, match="no sampler_topk_logprobs"):
        sampler_head(half, torch.zeros(2, 2, 1))


def test_the_sampled_tokens_are_the_last_columns() -> None:
    batch = make()
    assert sampled_ids(batch).tolist() == [[8, 9], [5, 6]]
    batch.metadata["response_length"] = 5
    assert sampled_ids(batch).tolist() == [[-1, -1, 7, 8, 9], [-1, -1, 0, 5, 6]]


def test_sampled_tokens_that_their_set_lacks_are_counted() -> None:
    metrics = MetricBuffer()
    batch = make()
    check_columns(batch, SamplerColumns.of(batch, replay=True, centering=True), metrics)
    assert numbers(metrics)["support_miss"] == pytest.approx(1 / 3)  # 9 is not in {4, 5}; the masked token is none


def test_a_trained_token_without_a_set_is_refused() -> None:
    batch = make()
    batch["loss_mask"] = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"1 trained tokens.*enable_return_sample_support_set"):
        check_columns(batch, SamplerColumns.of(batch, replay=True, centering=False), MetricBuffer())


@pytest.mark.parametrize("key", ["sample_support", "sampler_topk_ids"])
def test_an_id_that_is_named_twice_is_refused(key: str) -> None:
    batch = make()
    batch[key] = torch.full((2, 2, 2), 6, dtype=torch.int32)
    columns = SamplerColumns.of(batch, replay=True, centering=True)
    with pytest.raises(ValueError, match=f"{key} names an id twice"):
        check_columns(batch, columns, MetricBuffer())


def test_the_head_has_the_columns_and_the_models_log_probs() -> None:
    batch, log_probs = make(), torch.zeros(2, 2, 1)
    head = sampler_head(batch, log_probs)
    assert head.log_probs is log_probs
    assert head.ids is batch["sampler_topk_ids"]
    assert head.sampler_log_probs is batch["sampler_topk_logprobs"]
    assert head.sampled_ids.tolist() == [[8, 9], [5, 6]]
