"""The critic's loss of a micro-batch."""

from __future__ import annotations

import pytest
import torch

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.workers.critic import critic_micro_batch_loss
from skyrl.backends.skyrl_train.workers.metrics import MetricBuffer
from skyrl.config.algorithm import AlgorithmConfig

BATCH = TrainingInputBatch(
    {
        "values": torch.tensor([[0.5, 2.5], [float("nan"), 0.0]]),
        "returns": torch.tensor([[2.0, 2.0], [float("nan"), 3.0]]),
        "loss_mask": torch.tensor([[1.0, 1.0], [0.0, 1.0]]),
        "loss_weights": torch.tensor([[0.25, 0.25], [0.5, 0.5]]),  # the mean over rows of their token means
    }
)
VALUES = torch.tensor([[1.0, 2.0], [9.0, 1.0]])


@pytest.mark.parametrize(
    ("value_clip", "errors"),
    [(0.2, [(0.7 - 2) ** 2, 0.3**2, (0.2 - 3) ** 2]), (None, [1.0, 0.0, 4.0])],
    ids=["clipped", "free"],
)
def test_rows_weigh_the_same_and_the_clip_may_be_off(value_clip: float | None, errors: list[float]) -> None:
    metrics = MetricBuffer()
    values = VALUES.clone().requires_grad_()
    loss = critic_micro_batch_loss(BATCH, values, AlgorithmConfig(value_clip=value_clip), metrics)
    loss.backward()
    expected = 0.5 * ((errors[0] + errors[1]) / 2 + errors[2]) / 2
    assert loss.item() == pytest.approx(expected)
    assert values.grad is not None
    assert values.grad[1, 0] == 0
    assert metrics.result(lambda packed, op: packed) == {
        "critic_loss": pytest.approx(expected),
        "values_mean": pytest.approx(4 / 3),
        "values_clipfrac": 0.0 if value_clip is None else 1.0,
    }


def test_a_command_line_turns_the_clip_off() -> None:
    from skyrl.config.root import SkyRLTrainConfig

    config = SkyRLTrainConfig.from_cli_overrides(["trainer.algorithm.value_clip=null"])
    assert config.trainer.algorithm.value_clip is None
