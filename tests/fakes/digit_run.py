"""A run that teaches a tiny model to write digits, against a server that runs already.

Used in-process by the whole-loop tests, and as `python -m tests.fakes.digit_run key=value ...` by those that
interrupt a run.
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

import skyrl_gym
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.generators.base import GeneratorInput, GeneratorOutput
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

ENV = "digits"
SPARSE_ENV = "first_digit"
SIGNAL_VARIABLE = "SKYRL_TEST_SIGNAL"
"""`<signal number>:<step>`: send the driver a signal at that step's generation."""
KILL_SERVER_VARIABLE = "SKYRL_TEST_KILL_SERVER"
"""`<step>`: kill the inference server of this run while that step generates."""
DRIVER_VARIABLE = "SKYRL_TEST_DRIVER"
"""Process id of the driver; travels to the controller."""


class DigitEnv(BaseTextEnv):
    """One turn; the reward is the share of digits in the answer."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Score an answer."""
        share = sum(character.isdigit() for character in action) / len(action) if action else 0.0
        return BaseTextEnvStepOutput(observations=[], reward=share, done=True, metadata={})


class FirstDigitEnv(DigitEnv):
    """The reward is 1 for an answer that begins with a digit: most groups of a random model have no spread."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Score an answer."""
        reward = float(action[:1].isdigit())
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


class InterruptedGenerator(SkyRLGymGenerator):
    """Sends the driver a signal instead of rolling out the given step, or kills the server meanwhile."""

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        """Compare the step."""
        number, signal_step = (int(part) for part in os.environ.get(SIGNAL_VARIABLE, "0:-1").split(":"))
        metadata = input_batch["batch_metadata"]
        step = 0 if metadata is None else metadata.global_step
        if step == signal_step:
            os.kill(int(os.environ[DRIVER_VARIABLE]), number)
            await asyncio.sleep(60)
        if step == int(os.environ.get(KILL_SERVER_VARIABLE, -1)):
            asyncio.get_running_loop().call_later(0.3, kill_server)
        return await super().generate(input_batch, disable_tqdm)


def kill_server() -> None:
    """Kill the inference server actor of this run."""
    for process in psutil.process_iter(["cmdline"]):
        if "VLLMServerActor" in " ".join(process.info["cmdline"] or ()):
            with suppress(psutil.Error):
                if process.environ().get("SKYRL_LOG_FILE") == os.environ["SKYRL_LOG_FILE"]:
                    process.kill()


class DigitExp(BasePPOExp):
    """The experiment."""

    def __init__(self, cfg: Any) -> None:
        skyrl_gym.register(id=ENV, entry_point="tests.fakes.digit_run:DigitEnv", force=True)
        skyrl_gym.register(id=SPARSE_ENV, entry_point="tests.fakes.digit_run:FirstDigitEnv", force=True)
        super().__init__(cfg)

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:
        """Take the generator that interrupts, where a signal is asked for."""
        generator = super().get_generator(cfg, tokenizer, inference_engine_client)
        if {SIGNAL_VARIABLE, KILL_SERVER_VARIABLE} & os.environ.keys():
            generator.__class__ = InterruptedGenerator
        return generator


def write_prompts(path: Path, count: int) -> Path:
    """Write a data file of `count` different prompts."""
    rows = [{"prompt": [{"role": "user", "content": f"n{i}"}], "data_source": "digits"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def overrides(url: str, model: Path, folder: Path, *extra: str) -> list[str]:
    """Override tokens of a small fp32 run in `folder` against the server at `url`."""
    data = folder / "prompts.jsonl"
    if not data.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_prompts(data, 24)
    return [
        f"trainer.policy.model.path={model}",
        f"data.train_data=[{data}]",
        f"data.val_data=[{data}]",
        "data.dataloader.num_workers=0",
        f"trainer.ckpt_path={folder}/ckpt",
        f"trainer.export_path={folder}/export",
        f"trainer.log_path={folder}/logs",
        f"environment.env_class={ENV}",
        "trainer.bf16=false",
        "trainer.algorithm.use_kl_loss=false",
        "trainer.placement.colocate_all=false",
        "trainer.policy.optimizer_config.lr=1e-2",
        "trainer.gradient_checkpointing=false",
        "trainer.train_batch_size=8",
        "trainer.policy_mini_batch_size=8",
        "trainer.micro_train_batch_size_per_gpu=32",
        "trainer.micro_forward_batch_size_per_gpu=64",
        "trainer.epochs=100",
        "trainer.eval_interval=-1",
        "trainer.ckpt_interval=-1",
        "trainer.logger=console",
        "trainer.print_example_interval=-1",
        "trainer.enable_ray_gpu_monitor=false",
        "trainer.max_prompt_length=64",
        "generator.n_samples_per_prompt=8",
        "generator.deterministic=true",
        "generator.sampling_params.max_generate_length=8",
        "generator.inference_engine.run_engines_locally=false",
        f"generator.inference_engine.external_server_urls=[{url}]",
        f"generator.inference_engine.external_proxy_url={url}",
        "generator.inference_engine.model_dtype=float32",
        *extra,
    ]


if __name__ == "__main__":
    from skyrl.train.entrypoints.launch import run_hydra

    os.environ[DRIVER_VARIABLE] = str(os.getpid())
    run_hydra(DigitExp)
