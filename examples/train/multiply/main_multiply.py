"""python -m examples.train.multiply.main_multiply key=value ...: train on an environment of your own."""

from __future__ import annotations

from skyrl.config.root import SkyRLTrainConfig
from skyrl.train.entrypoints.launch import run_hydra
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl_gym.envs import register


class MultiplyExp(BasePPOExp):
    """Registers the environment in the controller, the process that makes the rollouts."""

    def __init__(self, cfg: SkyRLTrainConfig) -> None:
        register(id="multiply", entry_point="examples.train.multiply.env:MultiplyEnv")
        super().__init__(cfg)


if __name__ == "__main__":
    run_hydra(MultiplyExp)
