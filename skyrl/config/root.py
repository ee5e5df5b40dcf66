"""The root of the settings of an RL run."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass

from skyrl.config.algorithm import AlgorithmConfig
from skyrl.config.base import BaseConfig
from skyrl.config.data import DataConfig
from skyrl.config.environment import EnvironmentConfig
from skyrl.config.generator import GeneratorConfig
from skyrl.config.trainer import TrainerConfig


@dataclass
class SkyRLTrainConfig(BaseConfig):
    """All settings of an RL run."""

    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The training loop."""
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    """Rollouts and engines."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Environments."""


def make_config(
    algorithm_cls: type[AlgorithmConfig] | None = None,
    trainer_cls: type[TrainerConfig] | None = None,
    generator_cls: type[GeneratorConfig] | None = None,
) -> type[SkyRLTrainConfig]:
    """Return a subclass of ``SkyRLTrainConfig`` with your own groups in it.

    ``trainer_cls`` wins over ``algorithm_cls``: it holds its own ``algorithm`` field.

    Example:
        >>> @dataclass
        ... class DAPOConfig(AlgorithmConfig):
        ...     overlong_buffer_len: int | None = 512
        >>> make_config(algorithm_cls=DAPOConfig)().trainer.algorithm.overlong_buffer_len
        512
    """
    if trainer_cls is None and algorithm_cls is not None:
        algorithm = ("algorithm", algorithm_cls, field(default_factory=algorithm_cls))
        trainer_cls = make_dataclass(f"{algorithm_cls.__name__}Trainer", [algorithm], bases=(TrainerConfig,))
    groups = []
    if trainer_cls is not None:
        groups.append(("trainer", trainer_cls, field(default_factory=trainer_cls)))
    if generator_cls is not None:
        groups.append(("generator", generator_cls, field(default_factory=generator_cls)))
    return make_dataclass("CustomTrainConfig", groups, bases=(SkyRLTrainConfig,))
