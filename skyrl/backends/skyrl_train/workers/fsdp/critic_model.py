"""The critic: a transformers model with a linear head that values each response position."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skyrl.backends.skyrl_train.distributed.fsdp.export import gather_to_rank_zero, write_export
from skyrl.backends.skyrl_train.distributed.fsdp.shard import whole_tensor
from skyrl.backends.skyrl_train.workers.fsdp.load import load_config, load_model
from skyrl.backends.skyrl_train.workers.fsdp.model import position_ids_of
from skyrl.errors import ConfigError

logger = logging.getLogger(__name__)


class CriticModel(nn.Module):
    """Values of states: one linear head, without bias, on the last hidden state.

    The head is the attribute called ``value_head_prefix``, and the transformers model is `model`.
    """

    def __init__(self, model: Any, *, value_head_prefix: str = "value_head") -> None:
        super().__init__()
        if value_head_prefix in {"model", "training"} or hasattr(self, value_head_prefix):
            raise ConfigError(f"trainer.algorithm.value_head_prefix={value_head_prefix!r} is taken; use value_head")
        self.model = model
        self.value_head_prefix = value_head_prefix
        reference = next(model.parameters())
        head = nn.Linear(model.config.hidden_size, 1, bias=False, dtype=reference.dtype, device=reference.device)
        self.add_module(value_head_prefix, head)

    @property
    def head(self) -> nn.Linear:
        """The value head."""
        head = self.get_submodule(self.value_head_prefix)
        assert isinstance(head, nn.Linear)
        return head

    def init_head(self, seed: int) -> None:
        """Draw the head from N(0, 1/(hidden + 1)), with its own generator."""
        with torch.no_grad():
            weight = self.head.weight
            draw = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
            weight.copy_(draw / (weight.shape[1] + 1) ** 0.5)

    def gradient_checkpointing_enable(self, *, use_reentrant: bool = False) -> None:
        """Recompute each layer's activations in the backward pass (in train mode)."""
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})

    def forward(
        self, input_ids: Tensor, num_actions: int, attention_mask: Tensor, return_output: bool = False
    ) -> Tensor | tuple[Tensor, Any]:
        """Values [batch, num_actions] in float32, aligned as log-probs: column t is the state before token t.

        Args:
            input_ids: Token ids [batch, sequence], left-padded.
            num_actions: Width of the response part.
            attention_mask: 1 = real token.
            return_output: Also return the transformers output.
        """
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids_of(attention_mask),
            use_cache=False,
        )
        values = self.head(output.last_hidden_state).squeeze(-1).float()
        short = num_actions + 1 - values.shape[1]
        if short > 0:
            values = nn.functional.pad(values, (short, 0))
        values = values[:, -num_actions - 1 : -1]
        return (values, output) if return_output else values


def get_llm_for_sequence_regression(
    path: str,
    model_type: str = "critic",
    *,
    value_head_prefix: str = "value_head",
    bf16: bool = False,
    init_value_head: bool = False,
    seed: int = 0,
    model_config_kwargs: Mapping[str, Any] | None = None,
    meta_init: bool = False,
) -> CriticModel:
    """Build a critic from a language model, or from a critic that this library exported.

    Args:
        path: Hub name or directory.
        model_type: Only ``critic``.
        value_head_prefix: Attribute name of the head.
        bf16: Hold parameters in bf16.
        init_value_head: Draw the head even if the checkpoint has one (critic and policy start from one model).
        seed: Of that draw.
        model_config_kwargs: Overrides of the Hugging Face config.
        meta_init: Build without weights.

    Raises:
        ModelLoadError: The path holds no usable checkpoint.
        ConfigError: Another model type.
    """
    if model_type != "critic":
        raise ConfigError(f"model_type={model_type!r} is unknown; only critic is built")
    from transformers import AutoModel

    dtype = torch.bfloat16 if bf16 else torch.float32
    base = load_model(AutoModel, path, load_config(path, model_config_kwargs), dtype, with_weights=not meta_init)
    critic = CriticModel(base, value_head_prefix=value_head_prefix)
    if meta_init:
        return critic
    stored = None if init_value_head else read_value_head(path, value_head_prefix)
    if stored is None:
        critic.init_head(seed)
    else:
        with torch.no_grad():
            critic.head.weight.copy_(stored)
    return critic


def read_value_head(path: str, prefix: str) -> Tensor | None:
    """The head [1, hidden] of a critic that was exported to a local directory; None if there is none."""
    file = Path(path) / f"{prefix}.safetensors"
    if not file.is_file():
        return None
    from safetensors.torch import load_file

    return load_file(file)["weight"]


def save_critic(path: str, critic: CriticModel, dtype: torch.dtype, tokenizer: Any | None) -> None:
    """Export the language model and ``<value_head_prefix>.safetensors`` beside it. Collective.

    Raises:
        CheckpointError: The files could not be written.
    """
    head = whole_tensor(critic.head.weight).to("cpu", dtype)
    weights = gather_to_rank_zero(critic.model, dtype)
    write_export(path, critic.model, weights, tokenizer, extra={critic.value_head_prefix: {"weight": head}})
