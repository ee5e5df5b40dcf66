"""From dataset rows to a batch of prompts."""

from __future__ import annotations

import copy
from typing import Any

from skyrl.errors import ConfigError
from skyrl.train.generators.base import (
    BatchMetadata,
    GeneratorInput,
    SamplingParamsInput,
    TrainingPhase,
    TrajectoryID,
)


def prepare_generator_input(
    prompts: list[dict[str, Any]],
    n_samples_per_prompt: int,
    sampling_params: SamplingParamsInput | None,
    default_env_class: str | None,
    training_phase: TrainingPhase,
    global_step: int | None,
) -> tuple[GeneratorInput, list[str]]:
    """Repeat every prompt for its group.

    Args:
        prompts: Items of the data loader: `{"prompt", "env_class", "env_extras", "uid"}`.
        n_samples_per_prompt: Group size.
        sampling_params: Under the engine's names.
        default_env_class: For rows that name no environment.
        training_phase: `train` or `eval`.
        global_step: Training step; None outside training.

    Returns:
        The batch, in which the rollouts of a prompt stand together, and the uid of every row. Two prompts `a` and
        `b` with two samples give the uids `a, a, b, b`.

    Raises:
        ConfigError: A prompt names no environment and there is no default.
    """
    env_classes = {item["uid"]: item["env_class"] or default_env_class for item in prompts}
    nameless = [uid for uid, env_class in env_classes.items() if not env_class]
    if nameless:
        raise ConfigError(
            f"prompt {nameless[0]} names no environment and environment.env_class is null; set it, or add the column "
            "env_class to the data"
        )
    rows = [(item, repetition) for item in prompts for repetition in range(n_samples_per_prompt)]
    uids = [item["uid"] for item, _ in rows]
    batch = GeneratorInput(
        prompts=[item["prompt"] for item, _ in rows],
        env_classes=[str(env_classes[uid]) for uid in uids],
        env_extras=[copy.deepcopy(item["env_extras"]) for item, _ in rows],
        sampling_params=sampling_params,
        trajectory_ids=[TrajectoryID(item["uid"], repetition) for item, repetition in rows],
        batch_metadata=BatchMetadata(global_step=global_step, training_phase=training_phase),
    )
    return batch, uids
