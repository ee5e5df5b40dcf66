"""How many tokens prompts have, with the chat template around them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from skyrl.errors import DatasetError
from skyrl.types.rollout import ConversationType

SMALL_DATA = 20_000
"""Up to this many prompts it is quicker to measure here than to start processes."""

_CHUNK = 1_000


def measure_prompts(
    prompts: Sequence[ConversationType],
    tokenizer: Any,
    template_kwargs: Mapping[str, Any],
    num_workers: int,
    place: Callable[[int], str],
) -> list[int | None]:
    """Return the number of tokens of each prompt, generation prompt included; None where it has parts beside text.

    Args:
        prompts: Checked messages.
        tokenizer: A transformers tokenizer with a chat template.
        template_kwargs: Variables for the template.
        num_workers: Processes for more than `SMALL_DATA` prompts.
        place: Names a prompt by its index, for errors.

    Raises:
        DatasetError: The template refuses a prompt.
    """
    text_rows = [index for index, messages in enumerate(prompts) if not _has_other_parts(messages)]
    chunks = [text_rows[start : start + _CHUNK] for start in range(0, len(text_rows), _CHUNK)]
    measure = partial(_measure_chunk, tokenizer, dict(template_kwargs))
    conversations = [[prompts[index] for index in chunk] for chunk in chunks]
    lengths: list[int | None] = [None] * len(prompts)
    for chunk, measured in zip(chunks, _map(measure, conversations, num_workers, len(text_rows)), strict=True):
        if isinstance(measured, _Refused):
            raise DatasetError(f"{place(chunk[measured.index])}: the chat template refuses it: {measured.reason}")
        for index, length in zip(chunk, measured, strict=True):
            lengths[index] = length
    return lengths


class _Refused:
    """A prompt that the template does not take; travels between processes."""

    def __init__(self, index: int, reason: str) -> None:
        self.index = index
        self.reason = reason


def _map(
    measure: Callable[[list[ConversationType]], list[int] | _Refused],
    conversations: list[list[ConversationType]],
    num_workers: int,
    num_prompts: int,
) -> list[list[int] | _Refused]:
    if num_workers <= 1 or num_prompts <= SMALL_DATA:
        return [measure(chunk) for chunk in conversations]
    # Not fork: Ray, torch and the tokenizer have threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=num_workers, mp_context=context) as pool:
        return list(pool.map(measure, conversations))


def _measure_chunk(
    tokenizer: Any, template_kwargs: dict[str, Any], conversations: list[ConversationType]
) -> list[int] | _Refused:
    lengths = []
    for index, messages in enumerate(conversations):
        try:
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False, **template_kwargs
            )
        except Exception as cause:  # noqa: BLE001 - a template may raise anything; the caller names the row
            return _Refused(index, f"{type(cause).__name__}: {cause}")
        lengths.append(len(ids))
    return lengths


def _has_other_parts(messages: ConversationType) -> bool:
    return any(
        isinstance(message["content"], list) and any(part.get("type") != "text" for part in message["content"])
        for message in messages
    )
