"""A generator on fakes, and one batch through it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from skyrl.config.environment import SkyRLGymConfig
from skyrl.config.generator import GeneratorConfig, SamplingParams
from skyrl.train.generators.base import BatchMetadata, GeneratorInput, GeneratorOutput, TrajectoryID
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from tests.fakes.environments import EnvScript, ScriptedEnv, registered
from tests.fakes.inference_engine import FakeInferenceEngine

PROMPT = [{"role": "user", "content": "2+2?"}]


def make_config(**changes: Any) -> GeneratorConfig:
    sampling = SamplingParams(**changes.pop("sampling", {}))
    defaults: dict[str, Any] = {"max_input_length": 4096, "max_turns": 5, "max_failed_fraction": 1.0}
    return replace(GeneratorConfig(), sampling_params=sampling, **(defaults | changes))


def make_generator(
    engine: FakeInferenceEngine, tokenizer: Any, *, seed: int | None = None, model: str | None = None, **changes: Any
) -> SkyRLGymGenerator:
    return SkyRLGymGenerator(make_config(**changes), SkyRLGymConfig(), engine, tokenizer, model, seed=seed)


def make_batch(num_rows: int = 1, **changes: Any) -> GeneratorInput:
    batch: dict[str, Any] = {
        "prompts": [PROMPT for _ in range(num_rows)],
        "env_classes": ["scripted"] * num_rows,
        "env_extras": [{} for _ in range(num_rows)],
        "sampling_params": None,
        "trajectory_ids": [TrajectoryID("p", row) for row in range(num_rows)],
        "batch_metadata": BatchMetadata(global_step=1, training_phase="train"),
    }
    return batch | changes


def roll_out(
    generator: SkyRLGymGenerator,
    script: EnvScript,
    batch: GeneratorInput | None = None,
    *,
    cls: type[ScriptedEnv] = ScriptedEnv,
) -> GeneratorOutput:
    async def run() -> GeneratorOutput:
        async with asyncio.timeout(20):
            return await generator.generate(batch if batch is not None else make_batch())

    with registered(script, cls=cls):
        return asyncio.run(run())
