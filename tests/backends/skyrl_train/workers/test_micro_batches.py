from __future__ import annotations

import pytest
import torch

from skyrl.backends.skyrl_train.workers.micro_batches import get_microbatch_iterator, trim_left_padding
from skyrl.errors import ConfigError
from tests.backends.skyrl_train.workers.batches import SEQUENCE, make_batch


def test_chunks_keep_the_order_and_the_last_may_be_short() -> None:
    batch = make_batch()
    chunks = list(get_microbatch_iterator(batch, 3))
    assert [len(chunk) for chunk in chunks] == [3, 3, 2]
    assert torch.equal(torch.cat([chunk["advantages"] for chunk in chunks]), batch["advantages"])


def test_padding_that_all_rows_share_goes_and_nothing_else() -> None:
    batch = make_batch()
    rows = batch[0:2]
    trimmed = trim_left_padding(rows)
    longest = int(rows["attention_mask"].sum(-1).max())
    assert trimmed["sequences"].shape == (2, longest)
    assert torch.equal(trimmed["sequences"], rows["sequences"][:, SEQUENCE - longest :])
    assert torch.equal(trimmed["loss_mask"], rows["loss_mask"])
    assert trimmed.metadata == rows.metadata
    assert rows["sequences"].shape == (2, SEQUENCE)  # the input is untouched


def test_a_token_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_tokens_per_microbatch=100"):
        next(get_microbatch_iterator(make_batch(), 3, 100))
