"""Prompts and training tensors."""

from __future__ import annotations

from skyrl.utils.lazy import lazy_names

__getattr__ = lazy_names(__name__, {"PromptDataset": "skyrl.train.dataset.dataset"})
