"""Byte-level tokenizers, built in code, that differ in how their chat template behaves."""

from __future__ import annotations

from typing import Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Style = Literal["chatml", "strips_thinking", "forbids_system", "nothing_after_eos", "other_turn_end", "one_message"]

PAD, START, EOS, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|turn_end|>"

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Thinking disappears from an assistant message once a user message follows it, as in Qwen3's template.
_STRIPS_THINKING = (
    "{% set ns = namespace(last_user=-1) %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for message in messages %}"
    "{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' %}"
    "{% if loop.index0 > ns.last_user %}"
    "{% if '</think>' not in content %}{% set content = '<think>\n\n</think>\n\n' + content %}{% endif %}"
    "{% else %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)

# No system message, and user and assistant must alternate.
_FORBIDS_SYSTEM = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST]' + message['content'] + '[/INST]' }}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{% endfor %}"
)

_NOTHING_AFTER_EOS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)

# The template ends its turns with a token that is not the tokenizer's EOS.
_OTHER_TURN_END = _CHATML.replace("<|im_end|>", TURN_END)

# Whatever comes first, it is counted in the first token: nothing can be appended.
_ONE_MESSAGE = (
    "{{ messages | length }}{% for message in messages %}{{ message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '>' }}{% endif %}"
)

TEMPLATES: dict[Style, str] = {
    "chatml": _CHATML,
    "strips_thinking": _STRIPS_THINKING,
    "forbids_system": _FORBIDS_SYSTEM,
    "nothing_after_eos": _NOTHING_AFTER_EOS,
    "other_turn_end": _OTHER_TURN_END,
    "one_message": _ONE_MESSAGE,
}


def make_byte_tokenizer(style: Style = "chatml") -> PreTrainedTokenizerFast:
    """One token per byte (ids 4 to 259) and four special tokens (0 to 3); any text goes there and back."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([PAD, START, EOS, TURN_END, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[START, TURN_END],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATES[style]
    return tokenizer
