"""Small language models with random weights and a character tokenizer, made on the spot.

``make_tiny_model`` writes a directory that ``AutoModelForCausalLM``, ``AutoTokenizer`` and vLLM load like any
downloaded checkpoint. Nothing comes from a hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

Architecture = Literal["qwen3", "llama", "qwen3_moe"]

PAD, UNKNOWN, START, END = "<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>"
CONTEXT_TOKENS = 512

# ChatML: every message between <|im_start|>role\n and <|im_end|>\n.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_PRINTABLE = "\n\t" + "".join(chr(code) for code in range(32, 127))
# Latin letters fill the vocabulary up to 128 entries, a size that packed CPU kernels take.
VOCABULARY = [PAD, UNKNOWN, START, END, *_PRINTABLE, *(chr(0xC0 + i) for i in range(128 - 4 - len(_PRINTABLE)))]


def make_tiny_tokenizer(characters: str | None = None) -> PreTrainedTokenizerFast:
    """One token per character, four special tokens; pad (0) differs from eos (``<|im_end|>``).

    Args:
        characters: The characters of the vocabulary; None takes printable ASCII and some Latin letters (128 entries
            in all). Any other character becomes ``<|unk|>``.
    """
    entries = VOCABULARY if characters is None else [PAD, UNKNOWN, START, END, *dict.fromkeys(characters)]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(entries)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[START],
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny_config(
    arch: Architecture = "qwen3",
    *,
    vocab_size: int = len(VOCABULARY),
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    tie: bool = True,
) -> PreTrainedConfig:
    """A model configuration with head size 32 (the smallest that vLLM's CPU attention takes) and context 512."""
    shared: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": tie,
        "pad_token_id": VOCABULARY.index(PAD),
        "bos_token_id": None,
        "eos_token_id": VOCABULARY.index(END),
    }
    if arch == "qwen3":
        return Qwen3Config(**shared)
    if arch == "llama":
        return LlamaConfig(**shared)
    if arch == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
        return Qwen3MoeConfig(**shared, **experts, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True)
    raise ValueError(f"arch={arch!r} is not one of qwen3, llama, qwen3_moe")


def make_tiny_model(
    directory: str | Path,
    arch: Architecture = "qwen3",
    *,
    layers: int = 4,
    hidden: int = 64,
    seed: int = 0,
    dtype: str = "float32",
    tie: bool = True,
    characters: str | None = None,
) -> Path:
    """Write a model with random weights and its tokenizer into ``directory``, and return the directory.

    Args:
        directory: Created when missing; files of an earlier call are overwritten.
        arch: Architecture by transformers' model type.
        layers: Number of decoder layers.
        hidden: Width of the residual stream; a multiple of 32.
        seed: Same seed, same weights; torch's global generator is left as it was.
        dtype: Name of the torch dtype in which the weights are stored.
        tie: Whether the output head shares the input embedding.
        characters: See ``make_tiny_tokenizer``.
    """
    directory = Path(directory)
    tokenizer = make_tiny_tokenizer(characters)
    config = make_tiny_config(arch, vocab_size=len(tokenizer), layers=layers, hidden=hidden, tie=tie)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config = GenerationConfig(pad_token_id=config.pad_token_id, eos_token_id=config.eos_token_id)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
