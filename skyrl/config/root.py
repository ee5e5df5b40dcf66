"""The root of the settings of an RL run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Any, ClassVar, Self

from skyrl.config.algorithm import AlgorithmConfig
from skyrl.config.compose import Root, RootConfig, take_sources
from skyrl.config.data import DataConfig
from skyrl.config.derive import TRAIN_SOURCES, derive_across, derive_data, derive_generator, derive_trainer
from skyrl.config.environment import EnvironmentConfig
from skyrl.config.generator import GeneratorConfig
from skyrl.config.trainer import TrainerConfig


@dataclass
class SkyRLTrainConfig(RootConfig):
    """All settings of an RL run.

    Example:
        >>> config = SkyRLTrainConfig.from_cli_overrides(["generator.sampling_params.temperature=0.7"])
        >>> config.trainer.algorithm.temperature
        0.7
    """

    STORE_NAME: ClassVar[str] = "skyrl_train"
    SOURCES: ClassVar[Mapping[str, str]] = TRAIN_SOURCES
    LOG_KEY: ClassVar[str] = "trainer.log_path"
    JOB_KEYS: ClassVar[tuple[str, ...]] = (
        "trainer.ckpt_path",
        "trainer.export_path",
        "trainer.run_dir",
        "trainer.run_name",
    )

    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The training loop."""
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    """Rollouts and engines."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Environments."""

    def finalize(self) -> Self:
        """Set what follows from other settings, in place. Idempotent."""
        derive_data(self.data)
        derive_trainer(self.trainer)
        derive_generator(self.generator)
        take_sources(self)
        derive_across(self.trainer, self.generator)
        return self


def finalize(config: Root) -> Root:
    """Set what follows from other settings, in place. Idempotent; for configs that Python code built."""
    return config.finalize()


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
    groups: list[tuple[str, type, Any]] = []
    if trainer_cls is not None:
        groups.append(("trainer", trainer_cls, field(default_factory=trainer_cls)))
    if generator_cls is not None:
        groups.append(("generator", generator_cls, field(default_factory=generator_cls)))
    return make_dataclass("CustomTrainConfig", groups, bases=(SkyRLTrainConfig,))
