"""Rollout stage: dataset rows become the columns that training reads."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import gcd
from typing import Any

from skyrl.algorithms.advantages import AdvantageEstimatorRegistry
from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ConfigError
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput, TrainingPhase
from skyrl.train.generators.utils import prepare_generator_input, validate_generator_output
from skyrl.train.stages.baseline import add_greedy_rollouts, split_off_greedy
from skyrl.train.stages.rolled_out import RolledOut
from skyrl.train.stages.shaping import shape_rewards

logger = logging.getLogger(__name__)


def drop_uneven_tail(prompts: list[dict[str, Any]], *, samples: int, dp_lcm: int) -> list[dict[str, Any]]:
    """Drop the last prompts until the rollouts divide by every role's data-parallel size.

    Args:
        prompts: One entry per prompt.
        samples: Rollouts per prompt.
        dp_lcm: Least common multiple of the data-parallel sizes.

    Raises:
        ConfigError: If no prompt would be left.
    """
    return prompts[: even_count(len(prompts), samples=samples, dp_lcm=dp_lcm)]


def even_count(prompts: int, *, samples: int, dp_lcm: int) -> int:
    """Return the largest number of prompts up to `prompts` whose rollouts divide; see `drop_uneven_tail`."""
    stride = dp_lcm // gcd(dp_lcm, samples)
    kept = prompts // stride * stride
    if kept == 0:
        raise ConfigError(
            f"trainer.train_batch_size={prompts} prompts times generator.n_samples_per_prompt={samples} can't be "
            f"divided over {dp_lcm} data-parallel ranks; use a multiple of {stride} prompts"
        )
    return kept


class RolloutStage:
    """Runs the generator on a batch of dataset rows."""

    def __init__(self, generator: GeneratorInterface, cfg: SkyRLTrainConfig) -> None:
        self.generator = generator
        self._cfg = cfg
        engine = cfg.generator.inference_engine.backend
        self._sampling = {
            "train": get_sampling_params_for_backend(engine, cfg.generator.sampling_params),
            "eval": get_sampling_params_for_backend(
                engine,
                cfg.generator.eval_sampling_params,  # type: ignore[arg-type]  # derived: never None here
            ),
        }
        self._samples = {
            "train": cfg.generator.n_samples_per_prompt,
            "eval": cfg.generator.eval_n_samples_per_prompt,
        }

    def samples_per_prompt(self, phase: TrainingPhase) -> int:
        """Return how many rollouts each prompt gets."""
        return self._samples[phase]

    def prepare(
        self, prompts: Sequence[dict[str, Any]], *, phase: TrainingPhase, global_step: int | None
    ) -> tuple[GeneratorInput, list[str]]:
        """Repeat each prompt and say how to sample it; returns the input and the uid of every sample.

        For training with an estimator that needs a baseline, the input has one more row per prompt behind the
        samples: its greedy rollout (`baseline`).
        """
        inputs, uids = prepare_generator_input(
            list(prompts),
            self._samples[phase],
            self._sampling[phase],
            self._cfg.environment.env_class,
            phase,
            global_step,
        )
        if phase == "train" and self._needs_baseline():
            inputs = add_greedy_rollouts(inputs, uids, self._sampling[phase])
        return inputs, uids

    async def run(
        self, prompts: Sequence[dict[str, Any]], *, phase: TrainingPhase, global_step: int | None
    ) -> RolledOut:
        """Roll out every prompt and check what came back."""
        inputs, uids = self.prepare(prompts, phase=phase, global_step=global_step)
        output = await self.generator.generate(inputs)
        return self.check(inputs, output, uids)

    def check(self, inputs: GeneratorInput, output: GeneratorOutput, uids: list[str]) -> RolledOut:
        """Validate an output, take its metrics out of the columns, and put greedy rollouts aside."""
        validate_generator_output(len(inputs["prompts"]), output)
        columns = output.copy()
        metrics = columns.pop("rollout_metrics", None)
        rolled = RolledOut(inputs=inputs, output=columns, uids=uids, metrics=metrics or {})
        if len(inputs["prompts"]) == len(uids):
            return rolled
        return split_off_greedy(rolled, lambda greedy: shape_rewards(greedy, self._cfg))

    def _needs_baseline(self) -> bool:
        return AdvantageEstimatorRegistry.traits(self._cfg.trainer.algorithm.advantage_estimator).needs_baseline
