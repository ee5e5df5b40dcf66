"""Load a Hugging Face model for sharding: real weights on rank 0, shapes only elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from skyrl.errors import ModelLoadError

logger = logging.getLogger(__name__)

ATTENTION = "sdpa"


def load_config(path: str, overrides: Mapping[str, Any] | None = None) -> Any:
    """Read the model's config, with overrides of single fields.

    Raises:
        ModelLoadError: The path holds no model.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=True, **dict(overrides or {}))
    except (OSError, ValueError) as error:
        raise ModelLoadError(_no_model(path, error)) from error
    config.use_cache = False
    return config


def load_model(auto_class: Any, path: str, config: Any, dtype: torch.dtype, *, with_weights: bool) -> torch.nn.Module:
    """Build a model in ``dtype`` on the CPU with the weights of ``path``, or on the meta device without.

    Args:
        auto_class: ``AutoModelForCausalLM`` or ``AutoModel``.
        path: Hub name or directory.
        config: From `load_config`.
        dtype: Dtype in which parameters are held.
        with_weights: True on rank 0.

    Raises:
        ModelLoadError: The path holds no usable checkpoint.
    """
    try:
        if with_weights:
            return auto_class.from_pretrained(
                path, config=config, dtype=dtype, attn_implementation=ATTENTION, trust_remote_code=True
            )
        with torch.device("meta"):
            return auto_class.from_config(config, dtype=dtype, attn_implementation=ATTENTION, trust_remote_code=True)
    except (OSError, ValueError) as error:
        raise ModelLoadError(_no_model(path, error)) from error


def _no_model(path: str, error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"model.path={path!r} holds no usable model: {first}; give a directory with config.json and weights"
