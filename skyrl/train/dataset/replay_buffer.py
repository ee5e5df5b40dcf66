"""The worker-side view of a training batch, for user code that computes losses of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from skyrl.backends.skyrl_train.training_batch import TensorBatch, TensorList


@dataclass(kw_only=True)
class Experience:
    """The columns of a batch as attributes; `TrainingInput` documents each.

    Example: `experience = Experience.from_batch(batch).to_device("cuda:0")`.
    """

    sequences: Int[Tensor, "batch seq"]
    attention_mask: Int[Tensor, "batch seq"] | None = None
    response_mask: Int[Tensor, "batch response"] | None = None
    loss_mask: Float[Tensor, "batch response"] | None = None
    rollout_logprobs: Float[Tensor, "batch response"] | None = None
    action_log_probs: Float[Tensor, "batch response"] | None = None
    base_action_log_probs: Float[Tensor, "batch response"] | None = None
    values: Float[Tensor, "batch response"] | None = None
    returns: Float[Tensor, "batch response"] | None = None
    advantages: Float[Tensor, "batch response"] | None = None
    rewards: Float[Tensor, "batch response"] | None = None
    kl: Float[Tensor, "batch response"] | None = None
    loss_weights: Float[Tensor, "batch response"] | None = None
    valid_rows: Tensor | None = None
    baseline_scores: Float[Tensor, " batch"] | None = None
    reward_components: Float[Tensor, "batch rewards"] | None = None
    rollout_expert_indices: Tensor | None = None
    router_padding_mask: Tensor | None = None
    pixel_values: TensorList | None = None
    image_grid_thw: TensorList | None = None
    sub_seq_lengths: TensorList | None = None
    sample_support: Tensor | None = None
    sampler_topk_ids: Tensor | None = None
    sampler_topk_logprobs: Tensor | None = None
    num_actions: int
    """Width of the response columns."""
    info: dict[str, Any] = field(default_factory=dict)
    """Whatever the user's code wants to carry along."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The batch's."""

    @classmethod
    def from_batch(cls, batch: TensorBatch) -> Self:
        """Name the columns of a batch; the memory is shared.

        Raises:
            KeyError: The batch lacks `sequences`, or `response_length` in its metadata.
            TypeError: The batch has a column that `TrainingInput` does not know.
        """
        return cls(**batch, num_actions=batch.metadata["response_length"], metadata=dict(batch.metadata))

    def to_device(self, device: torch.device | str) -> Self:
        """Return the view with all columns on a device."""
        columns = {one.name: getattr(self, one.name) for one in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in columns.items() if isinstance(value, Tensor | TensorList)
        }
        return replace(self, **moved)
