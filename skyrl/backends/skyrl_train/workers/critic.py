"""The critic's loss of one micro-batch: the same weights and the same path as the policy's."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from skyrl.algorithms.critic_loss import critic_loss
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.workers.metrics import MetricBuffer
from skyrl.config.algorithm import AlgorithmConfig


def critic_micro_batch_loss(
    batch: TrainingInputBatch,
    values: Float[Tensor, "rows response"],
    algorithm: AlgorithmConfig,
    metrics: MetricBuffer,
) -> Float[Tensor, ""]:
    """This micro-batch's part of the mini-batch's value loss (a sum); adds its metrics."""
    loss, means = critic_loss(
        values,
        batch["values"],
        batch["returns"],
        loss_mask=batch["loss_mask"],
        loss_weights=batch.get("loss_weights"),
        value_clip=algorithm.value_clip,
    )
    metrics.add_sum("critic_loss", loss)
    tokens = (batch["loss_mask"] != 0).sum()
    for name, mean in means.items():
        metrics.add_named(name, mean, tokens)
    return loss
