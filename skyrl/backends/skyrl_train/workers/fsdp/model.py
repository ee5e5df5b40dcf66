"""The policy and the reference: a transformers causal LM that returns log-probs of given tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skyrl.backends.skyrl_train.workers.fsdp.load import load_config, load_model
from skyrl.backends.skyrl_train.workers.fsdp.logprobs import (
    DEFAULT_CHUNK_TOKENS,
    head_logprobs,
    logprobs_and_entropy_from_logits,
    logprobs_from_logits,
)
from skyrl.errors import ConfigError

__all__ = ["HFModelWrapper", "last_predictions", "logprobs_from_logits", "position_ids_of"]

logger = logging.getLogger(__name__)

# Models whose logits are lm_head(last hidden state) and nothing more (no soft-capping, no scale): their head is
# computed at response positions only. Others take the general path through the model's own forward.
PLAIN_HEAD_MODELS = frozenset(
    ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "olmo2", "phi3", "smollm3")
)


def position_ids_of(attention_mask: Tensor) -> Tensor:
    """Positions that start at 0 with the first real token of each row; padding gets 1."""
    return (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)


@dataclass(frozen=True, slots=True)
class WantedTokens:
    """Positions whose hidden state predicts a wanted token, and that token, all [wanted]."""

    rows: Tensor
    columns: Tensor
    labels: Tensor
    num_actions: int
    """Width of the response part."""

    def flat(self, width: int) -> Tensor:
        """Indices into a flattened [batch, width]."""
        return self.rows * width + self.columns


class HFModelWrapper(nn.Module):
    """A causal LM for training on padded batches with SDPA.

    This module, not the transformers model inside it, is the FSDP root: the output head is used directly, inside the
    root's forward pass. `model` has the Hugging Face parameter names.

    Args:
        path_or_module: Hub name, directory, or a loaded transformers model.
        use_flash_attention_2: Accepted; SDPA is used.
        bf16: Hold parameters in bf16; trainers hold fp32 masters.
        temperature: Default divisor of the logits.
        remove_microbatch_padding: Accepted; padded batches are used.
        model_config_kwargs: Overrides of the Hugging Face config.
        meta_init: Build without weights, on the meta device.
        logprobs_chunk_size: Tokens whose logits exist at one time.

    Raises:
        ModelLoadError: The path holds no usable checkpoint.
        ConfigError: The temperature is not positive.
    """

    def __init__(
        self,
        path_or_module: str | nn.Module,
        *,
        use_flash_attention_2: bool = False,
        bf16: bool = True,
        temperature: float = 1.0,
        remove_microbatch_padding: bool = False,
        model_config_kwargs: Mapping[str, Any] | None = None,
        meta_init: bool = False,
        logprobs_chunk_size: int | None = DEFAULT_CHUNK_TOKENS,
    ) -> None:
        super().__init__()
        if temperature <= 0:
            raise ConfigError(
                f"trainer.algorithm.temperature={temperature} must be above 0 to compute log-probs; set it to 1.0 when "
                "sampling is greedy"
            )
        if use_flash_attention_2 or remove_microbatch_padding:
            _give_notice(use_flash_attention_2, remove_microbatch_padding)
        self.temperature = temperature
        self.chunk_tokens = logprobs_chunk_size or DEFAULT_CHUNK_TOKENS
        self.model: Any = path_or_module
        if isinstance(path_or_module, str):
            from transformers import AutoModelForCausalLM

            dtype = torch.bfloat16 if bf16 else torch.float32
            config = load_config(path_or_module, model_config_kwargs)
            self.model = load_model(AutoModelForCausalLM, path_or_module, config, dtype, with_weights=not meta_init)
        self.model.config.use_cache = False
        self._plain_head = self.model.config.model_type in PLAIN_HEAD_MODELS

    def gradient_checkpointing_enable(self, *, use_reentrant: bool = False) -> None:
        """Recompute each layer's activations in the backward pass (in train mode)."""
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})

    def forward(
        self,
        sequences: Tensor,
        num_actions: int,
        attention_mask: Tensor,
        temperature: float | None = None,
        return_output: bool = False,
        compute_entropy: bool = False,
        entropy_requires_grad: bool = True,
        response_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Log-probs of the last ``num_actions`` tokens of each row.

        Args:
            sequences: Token ids [batch, sequence], left-padded.
            num_actions: Width R of the response part.
            attention_mask: 1 = real token [batch, sequence].
            temperature: Divides the logits; None takes the constructor's.
            return_output: Also return ``{"entropy": [batch, sequence]}``, indexed by the position that predicts.
            compute_entropy: Fill that entropy (nats); zeros otherwise.
            entropy_requires_grad: Whether it carries a gradient.
            response_mask: 1 = wanted [batch, R]; None takes every real token.

        Returns:
            Log-probs [batch, R] in float32 nats; 0 where not wanted.
        """
        temperature = self.temperature if temperature is None else temperature
        rows, columns = _wanted_positions(attention_mask, num_actions, response_mask)
        options = {"with_entropy": compute_entropy, "entropy_grad": entropy_requires_grad}
        inputs = {
            "input_ids": sequences,
            "attention_mask": attention_mask,
            "position_ids": position_ids_of(attention_mask),
            "use_cache": False,
        }
        wanted = WantedTokens(rows, columns, sequences[rows, columns + 1], num_actions)
        score = self._score_by_head if self._plain_head else self._score_by_logits
        logprobs, entropy = score(inputs, wanted, temperature, options)
        flat = wanted.flat(sequences.shape[1])
        whole = _scatter(logprobs, flat, sequences.shape)
        result = last_predictions(whole, num_actions)
        return (result, {"entropy": _scatter(entropy, flat, sequences.shape)}) if return_output else result

    def _score_by_head(
        self, inputs: Mapping[str, Any], wanted: WantedTokens, temperature: float, options: Mapping[str, bool]
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy at the wanted positions, with the output head applied there only."""
        hidden = self.model.base_model(**inputs).last_hidden_state
        head = self.model.get_output_embeddings()
        chosen = hidden.flatten(0, 1).index_select(0, wanted.flat(hidden.shape[1]))
        return head_logprobs(
            chosen,
            head.weight,
            head.bias,
            wanted.labels,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            **options,
        )

    def _score_by_logits(
        self, inputs: Mapping[str, Any], wanted: WantedTokens, temperature: float, options: Mapping[str, bool]
    ) -> tuple[Tensor, Tensor]:
        """The same through the model's own forward pass, for heads that do more than a product."""
        width = inputs["input_ids"].shape[1]
        kept = min(wanted.num_actions + 1, width)
        logits = self.model(**inputs, logits_to_keep=kept).logits
        local = wanted.rows * kept + wanted.columns - (width - kept)
        chosen = logits.flatten(0, 1).index_select(0, local) / temperature
        return logprobs_and_entropy_from_logits(chosen, wanted.labels, chunk_size=self.chunk_tokens, **options)


def _wanted_positions(attention_mask: Tensor, num_actions: int, response_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows and columns whose hidden state predicts a wanted token (the token stands one column further)."""
    real = attention_mask.bool()
    width = attention_mask.shape[1]
    wanted = torch.zeros_like(real)
    first = max(1, width - num_actions)
    wanted[:, first:] = (
        True if response_mask is None else response_mask[:, response_mask.shape[1] - (width - first) :].bool()
    )
    wanted[:, 1:] &= real[:, 1:] & real[:, :-1]
    rows, columns = torch.nonzero(wanted, as_tuple=True)
    return rows, columns - 1


def _scatter(values: Tensor, flat: Tensor, shape: torch.Size) -> Tensor:
    """Values at flat positions of a zero [batch, sequence] tensor."""
    empty = torch.zeros(shape[0] * shape[1], dtype=values.dtype, device=values.device)
    return empty.index_copy(0, flat, values).view(shape[0], shape[1])


def last_predictions(whole: Tensor, num_actions: int) -> Tensor:
    """Columns -R-1 to -2 of [batch, sequence], with zeros in front when the sequence is shorter than that."""
    short = num_actions + 1 - whole.shape[1]
    if short > 0:
        whole = torch.nn.functional.pad(whole, (short, 0))
    return whole[:, -num_actions - 1 : -1]


def _give_notice(flash: bool, packing: bool) -> None:
    asked = [key for key, on in (("trainer.flash_attn", flash), ("trainer.remove_microbatch_padding", packing)) if on]
    logger.info("%s: training uses padded batches and SDPA attention", " and ".join(f"{key}=true" for key in asked))
