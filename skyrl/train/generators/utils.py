"""Upstream's path for functions on rollouts.

They live in `columns`, `masks`, `messages`, `metrics`, `output_checks`, `prompts` and `step_merge`.
"""

from __future__ import annotations

from skyrl.train.generators.columns import concatenate_generator_outputs, slice_generator_output
from skyrl.train.generators.masks import apply_overlong_filtering, zero_rewards_on_non_stop
from skyrl.train.generators.messages import (
    encode_messages_subset,
    get_generation_prompt_ids,
    get_response_ids_and_loss_mask_from_messages,
)
from skyrl.train.generators.metrics import (
    compute_turn_token_counts,
    get_metrics_from_generator_output,
    get_rollout_metrics,
)
from skyrl.train.generators.output_checks import validate_generator_output
from skyrl.train.generators.prompts import prepare_generator_input
from skyrl.train.generators.step_merge import merge_stepwise_output

__all__ = [
    "apply_overlong_filtering",
    "compute_turn_token_counts",
    "concatenate_generator_outputs",
    "encode_messages_subset",
    "get_generation_prompt_ids",
    "get_metrics_from_generator_output",
    "get_response_ids_and_loss_mask_from_messages",
    "get_rollout_metrics",
    "merge_stepwise_output",
    "prepare_generator_input",
    "slice_generator_output",
    "validate_generator_output",
    "zero_rewards_on_non_stop",
]
