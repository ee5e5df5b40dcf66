"""Which log-probs count as those of the old policy."""

import torch

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.workers.policy import PolicyRows, old_log_probs


def rows(*, old_is_current: bool) -> PolicyRows:
    ones = torch.ones(1, 2)
    batch = TrainingInputBatch(
        {"loss_mask": ones, "response_mask": ones, "action_log_probs": torch.tensor([[-3.0, -4.0]])}
    )
    batch.metadata = {"response_length": 2, "old_is_current": old_is_current}
    return PolicyRows.from_batch(batch)


def test_the_only_optimizer_step_takes_its_own_log_probs_without_gradient() -> None:
    now = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old = old_log_probs(rows(old_is_current=True), now)
    assert old is not None
    assert torch.equal(old, now)
    assert not old.requires_grad


def test_any_other_step_takes_those_of_the_batch() -> None:
    now = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old = old_log_probs(rows(old_is_current=False), now)
    assert old is not None
    assert old.tolist() == [[-3.0, -4.0]]
