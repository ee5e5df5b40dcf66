"""Shaping stage: what is done to rewards and loss masks before they become a training batch.

Pure: each function returns other columns and leaves those that it got alone.
"""

from __future__ import annotations

import torch

from skyrl.algorithms.group_filters import zero_variance_rows
from skyrl.algorithms.overlong import punish_overlong
from skyrl.config.algorithm import AlgorithmConfig, declares_overlong_again
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ConfigError
from skyrl.train.generators.base import GeneratorOutput
from skyrl.train.generators.metrics import valid_rows
from skyrl.train.generators.rewards import total_reward


def row_scores(output: GeneratorOutput) -> torch.Tensor:
    """Return the sum of each row's rewards, float64."""
    return torch.tensor([total_reward(reward) for reward in output["rewards"]], dtype=torch.float64)


def valid_mask(output: GeneratorOutput) -> torch.Tensor:
    """Say which rows are samples of the policy: those that did not fail."""
    rows = len(output["response_ids"])
    mask = torch.zeros(rows, dtype=torch.bool)
    mask[valid_rows(output.get("stop_reasons"), rows)] = True
    return mask


def shape_rewards(output: GeneratorOutput, cfg: SkyRLTrainConfig) -> GeneratorOutput:
    """Punish overlong responses, if `trainer.algorithm.overlong_buffer_len` asks for it.

    Nothing happens where a subclass of the settings declares that key again: then the user's trainer does it.

    Raises:
        ConfigError: Responses have no length limit.
    """
    algorithm, limit = cfg.trainer.algorithm, cfg.generator.sampling_params.max_generate_length
    if algorithm.overlong_buffer_len is None or declares_overlong_again(algorithm):
        return output
    if limit is None:
        raise ConfigError(
            f"trainer.algorithm.overlong_buffer_len={algorithm.overlong_buffer_len} needs a limit that responses come "
            "close to; set generator.sampling_params.max_generate_length"
        )
    rewards = punish_overlong(
        output["rewards"],
        [len(response) for response in output["response_ids"]],
        max_len=limit,
        buffer_len=algorithm.overlong_buffer_len,
        factor=algorithm.overlong_buffer_penalty_factor,
    )
    return {**output, "rewards": rewards}


def mask_flat_groups(
    output: GeneratorOutput, uids: list[str], algorithm: AlgorithmConfig
) -> tuple[GeneratorOutput, dict[str, float]]:
    """Keep groups without a spread of rewards out of the loss, if `zero_variance_filter` asks for it.

    Returns:
        The columns, the loss masks of those groups all zero, and the metric `reward/num_zero_variance_filtered`:
        how many groups those are.
    """
    if not algorithm.zero_variance_filter:
        return output, {}
    live = torch.tensor([any(mask) for mask in output["loss_masks"]], dtype=torch.bool) & valid_mask(output)
    flat, count = zero_variance_rows(row_scores(output), live, uids, algorithm.zero_variance_filter_tol)
    masks = [
        [0] * len(mask) if is_flat else mask for mask, is_flat in zip(output["loss_masks"], flat.tolist(), strict=True)
    ]
    return {**output, "loss_masks": masks}, {"reward/num_zero_variance_filtered": count}
