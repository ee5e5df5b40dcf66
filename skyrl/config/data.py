"""Settings of the data sets and of the loader that feeds them (`data`)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from skyrl.config.base import BaseConfig


@dataclass
class DataLoaderConfig(BaseConfig):
    """How prompts are loaded (`data.dataloader`)."""

    num_workers: int | None = None
    """Processes that load prompts; 0 loads in the controller, None means 8."""
    persistent_workers: bool = False
    """Keep the loading processes between epochs; needs ``num_workers`` above 0."""


@dataclass
class DataConfig(BaseConfig):
    """Which prompts to train and to evaluate on (`data`)."""

    train_data: list[str] = field(default_factory=lambda: [os.path.expanduser("~/data/gsm8k/train.parquet")])
    """Training prompts: parquet, json or jsonl files, or names of hub data sets (``name:split``); concatenated."""
    val_data: list[str] | None = field(default_factory=lambda: [os.path.expanduser("~/data/gsm8k/validation.parquet")])
    """Evaluation prompts in the same forms, reported for each ``data_source`` and overall; empty: no evaluation."""
    dataloader: DataLoaderConfig = field(default_factory=DataLoaderConfig)
    """How prompts are loaded."""
