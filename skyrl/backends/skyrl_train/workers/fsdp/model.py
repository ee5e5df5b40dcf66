"""The policy and the reference: a transformers causal LM that returns log-probs of given tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skyrl.algorithms.sampler_support import (
    candidate_entropy,
    candidate_log_probs,
    has_ids,
    positions_among,
    take_positions,
    unite,
)
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.workers.fsdp.load import load_config, load_model
from skyrl.backends.skyrl_train.workers.fsdp.logprobs import head_logprobs, logprobs_from_logits, scores_from_logits
from skyrl.backends.skyrl_train.workers.fsdp.support_logprobs import support_logprobs
from skyrl.backends.skyrl_train.workers.fsdp.token_scores import (
    DEFAULT_CHUNK_TOKENS,
    ScoreOptions,
    Targets,
    TokenScores,
)
from skyrl.backends.skyrl_train.workers.sampler_columns import SamplerColumns
from skyrl.errors import ConfigError

__all__ = ["HFModelWrapper", "last_predictions", "logprobs_from_logits", "position_ids_of", "score_response"]

logger = logging.getLogger(__name__)

# Models whose logits are lm_head(last hidden state) and nothing more (no soft-capping, no scale): their head is
# computed at response positions only. Others take the general path through the model's own forward.
PLAIN_HEAD_MODELS = frozenset(
    ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "olmo2", "phi3", "smollm3")
)


def position_ids_of(attention_mask: Tensor) -> Tensor:
    """Positions that start at 0 with the first real token of each row; padding gets 1."""
    return (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedTokens:
    """Positions whose hidden state predicts a wanted token, and that token, all [wanted]."""

    rows: Tensor
    columns: Tensor
    labels: Tensor
    num_actions: int
    """Width of the response part."""
    support: Tensor | None
    """Candidates of each [wanted, width]; None = the vocabulary."""
    members: Tensor | None
    """Further ids to score at each [wanted, head]."""

    @classmethod
    def find(
        cls,
        sequences: Tensor,
        attention_mask: Tensor,
        num_actions: int,
        response_mask: Tensor | None,
        sampler: SamplerColumns,
    ) -> WantedTokens:
        """Real tokens of the response; with sets, only tokens that have one."""
        if sampler.support is not None:
            sampled = has_ids(sampler.support)
            response_mask = sampled if response_mask is None else sampled & response_mask.bool()
        rows, columns = _wanted_positions(attention_mask, num_actions, response_mask)
        response = columns + 1 - (sequences.shape[1] - num_actions)
        return cls(
            rows=rows,
            columns=columns,
            labels=sequences[rows, columns + 1],
            num_actions=num_actions,
            support=None if sampler.support is None else sampler.support[rows, response],
            members=None if sampler.head_ids is None else sampler.head_ids[rows, response],
        )

    def flat(self, width: int) -> Tensor:
        """Indices into a flattened [batch, width]."""
        return self.rows * width + self.columns

    def spread_members(self, members: Tensor, batch: int, width: int) -> Tensor:
        """Log-probs [wanted, head] as [batch, R, head], -inf elsewhere; the sequence is `width` long."""
        flat = self.rows * self.num_actions + self.columns + 1 - (width - self.num_actions)
        empty = members.new_full((batch * self.num_actions, members.shape[-1]), -torch.inf)
        return empty.index_copy(0, flat, members).view(batch, self.num_actions, -1)


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

    def forward(  # noqa: PLR0913 (upstream's signature)
        self,
        sequences: Tensor,
        num_actions: int,
        attention_mask: Tensor,
        temperature: float | None = None,
        return_output: bool = False,
        compute_entropy: bool = False,
        entropy_requires_grad: bool = True,
        response_mask: Tensor | None = None,
        sampler: SamplerColumns | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Log-probs of the last ``num_actions`` tokens of each row.

        Args:
            sequences: Token ids [batch, sequence], left-padded.
            num_actions: Width R of the response part.
            attention_mask: 1 = real token [batch, sequence].
            temperature: Divides the logits; None takes the constructor's.
            return_output: Also return ``{"entropy": [batch, sequence]}``, indexed by the position that predicts, and
                with ``sampler.head_ids`` their log-probs ``{"members": [batch, R, head]}``, -inf where there is none.
            compute_entropy: Fill that entropy (nats); zeros otherwise.
            entropy_requires_grad: Whether it carries a gradient.
            response_mask: 1 = wanted [batch, R]; None takes every real token.
            sampler: Sets to normalise over, and further ids to score.

        Returns:
            Log-probs [batch, R] in float32 nats; 0 where not wanted, and where the token has no set while others do.
        """
        wanted = WantedTokens.find(
            sequences, attention_mask, num_actions, response_mask, SamplerColumns() if sampler is None else sampler
        )
        options = ScoreOptions(
            temperature=self.temperature if temperature is None else temperature,
            chunk_tokens=self.chunk_tokens,
            with_entropy=compute_entropy,
            entropy_grad=entropy_requires_grad,
        )
        inputs = {
            "input_ids": sequences,
            "attention_mask": attention_mask,
            "position_ids": position_ids_of(attention_mask),
            "use_cache": False,
        }
        scores = (self._score_by_head if self._plain_head else self._score_by_logits)(inputs, wanted, options)
        batch, width = sequences.shape
        flat = wanted.flat(width)
        result = last_predictions(_scatter(scores.log_probs, flat, sequences.shape), num_actions)
        if not return_output:
            return result
        output = {"entropy": _scatter(scores.entropy, flat, sequences.shape)}
        if wanted.members is not None:
            output["members"] = wanted.spread_members(scores.members, batch, width)
        return result, output

    def _score_by_head(self, inputs: Mapping[str, Any], wanted: WantedTokens, options: ScoreOptions) -> TokenScores:
        """Score the wanted positions, with the output head applied there only."""
        hidden = self.model.base_model(**inputs).last_hidden_state
        head = self.model.get_output_embeddings()
        chosen = hidden.flatten(0, 1).index_select(0, wanted.flat(hidden.shape[1]))
        if wanted.support is None:
            return head_logprobs(chosen, head.weight, head.bias, wanted.labels, wanted.members, options)
        return support_logprobs(chosen, head.weight, head.bias, wanted.labels, wanted.support, wanted.members, options)

    def _score_by_logits(self, inputs: Mapping[str, Any], wanted: WantedTokens, options: ScoreOptions) -> TokenScores:
        """The same through the model's own forward pass, for heads that do more than a product."""
        width = inputs["input_ids"].shape[1]
        kept = min(wanted.num_actions + 1, width)
        logits = self.model(**inputs, logits_to_keep=kept).logits
        local = wanted.rows * kept + wanted.columns - (width - kept)
        chosen = logits.flatten(0, 1).index_select(0, local)
        if wanted.support is None:
            return scores_from_logits(chosen, wanted.labels, wanted.members, options)
        ids = unite(wanted.support.long(), wanted.labels).ids
        log_p = candidate_log_probs(chosen.gather(-1, ids.clamp(min=0)), ids, options.temperature)
        entropy = candidate_entropy(log_p) if options.with_entropy else torch.zeros_like(log_p[:, 0])
        members = Targets.of(wanted.labels, wanted.members).members
        return TokenScores.of((log_p[:, 0], entropy, take_positions(log_p, positions_among(members, ids))), options)


def score_response(
    module: nn.Module,
    micro: TrainingInputBatch,
    columns: SamplerColumns,
    temperature: float | None,
    *,
    entropy: bool = False,
    entropy_grad: bool = False,
) -> TokenScores:
    """Score the response of a micro-batch, all [rows, R]; `module` is an `HFModelWrapper`, sharded or not."""
    width = micro.metadata["response_length"]
    log_probs, output = module(
        micro["sequences"],
        width,
        micro["attention_mask"],
        temperature=temperature,
        return_output=True,
        compute_entropy=entropy,
        entropy_requires_grad=entropy_grad,
        response_mask=micro.get("response_mask"),
        sampler=columns,
    )
    members = output["members"] if columns.head_ids is not None else log_probs.new_empty(*log_probs.shape, 0)
    return TokenScores(log_probs, last_predictions(output["entropy"], width), members)


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
