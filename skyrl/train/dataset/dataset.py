"""Prompts of a run: rows with messages, an environment, and whatever the environment needs."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from skyrl.errors import DatasetError
from skyrl.train.dataset.prompt_length import measure_prompts
from skyrl.train.dataset.sources import MISSING, Source, open_source
from skyrl.types.rollout import ConversationType

logger = logging.getLogger(__name__)

PromptItem = tuple[ConversationType, str | None, dict[str, Any], str]
"""Messages, environment or None, all other columns, uid."""


class PromptDataset(Dataset[PromptItem]):
    """Prompts from files or hub data sets, those that are too long left out.

    Args:
        datasets: Paths (`.parquet`, `.json`, `.jsonl`) or hub names (`name`, `name:split`), one or several.
        tokenizer: A transformers tokenizer with a chat template.
        max_prompt_length: Most tokens of a templated prompt, generation prompt included. Prompts with parts that
            are no text are not measured.
        num_workers: Processes that measure large data; up to 1 measures in this one.
        prompt_key: Column with the messages.
        env_class_key: Column with the environment's name; rows may lack it.
        chat_template_kwargs: Variables for the chat template, the same as at generation.

    Raises:
        DatasetError: A file is missing or unreadable, a row lacks what training needs, or no prompt is left. The
            text names file, row (from 1) and column.
    """

    def __init__(
        self,
        datasets: str | Sequence[str],
        tokenizer: Any,
        max_prompt_length: int,
        num_workers: int = 8,
        prompt_key: str = "prompt",
        env_class_key: str = "env_class",
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.datasets = [datasets] if isinstance(datasets, str) else list(datasets)
        self.tokenizer = tokenizer
        self.max_prompt_length = max_prompt_length
        self.prompt_key = prompt_key
        self.env_class_key = env_class_key
        self._sources = [open_source(name) for name in self.datasets]
        self._starts = [0]
        for source in self._sources:
            self._starts.append(self._starts[-1] + len(source))
        prompts = [messages for source in self._sources for messages in self._checked_prompts(source)]
        lengths = measure_prompts(prompts, tokenizer, chat_template_kwargs or {}, num_workers, self._place)
        self._kept = [index for index, length in enumerate(lengths) if length is None or length <= max_prompt_length]
        self.token_lengths = [lengths[index] for index in self._kept]
        """Tokens of every prompt that is kept; None where it was not measured."""
        self._report(len(prompts))

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> PromptItem:
        source, row_index = self._locate(self._kept[index])
        row = source.row(row_index)
        messages = row.pop(self.prompt_key)
        env_class = row.pop(self.env_class_key, None)
        return messages, env_class, row, str(index)

    def env_classes(self) -> Iterator[tuple[str, str | None]]:
        """Yield for every prompt where its environment is named (file, row, column), and the name if there is one."""
        columns = [source.column(self.env_class_key) for source in self._sources]
        for index in self._kept:
            which = bisect_right(self._starts, index) - 1
            source, row_index = self._locate(index)
            name = columns[which][row_index]
            yield _cell(source, row_index, self.env_class_key), None if name is MISSING else name

    @staticmethod
    def collate_fn(items: Sequence[PromptItem]) -> list[dict[str, Any]]:
        """See the function `collate_fn`."""
        return collate_fn(items)

    def _locate(self, index: int) -> tuple[Source, int]:
        which = bisect_right(self._starts, index) - 1
        return self._sources[which], index - self._starts[which]

    def _place(self, index: int) -> str:
        source, row_index = self._locate(index)
        return _cell(source, row_index, self.prompt_key)

    def _checked_prompts(self, source: Source) -> Iterator[ConversationType]:
        rows = zip(source.column(self.prompt_key), source.column(self.env_class_key), strict=True)
        for index, (messages, env_class) in enumerate(rows):
            if messages is MISSING:
                raise DatasetError(
                    f"{_cell(source, index, self.prompt_key)}: missing; the row has {sorted(source.row(index))}. "
                    'Each row needs messages: [{"role": "user", "content": "..."}]'
                )
            problem = _message_problem(messages)
            if problem is not None:
                raise DatasetError(f"{_cell(source, index, self.prompt_key)}: {problem}")
            if env_class is not MISSING and not isinstance(env_class, str | None):
                raise DatasetError(
                    f"{_cell(source, index, self.env_class_key)}: must be the name of an environment, not {env_class!r}"
                )
            yield messages

    def _report(self, num_rows: int) -> None:
        names = ", ".join(self.datasets)
        if num_rows == 0:
            raise DatasetError(f"{names}: there are no rows")
        dropped = num_rows - len(self)
        if not self._kept:
            raise DatasetError(
                f"{names}: all {num_rows} prompts are longer than trainer.max_prompt_length={self.max_prompt_length} "
                "tokens; raise it, or shorten the prompts"
            )
        if dropped:
            logger.warning(
                "%s: dropped %d of %d prompts, longer than trainer.max_prompt_length=%d tokens",
                names,
                dropped,
                num_rows,
                self.max_prompt_length,
            )
        logger.info("%s: %d prompts", names, len(self))


def collate_fn(items: Sequence[PromptItem]) -> list[dict[str, Any]]:
    """Turn items of a `PromptDataset` into what `prepare_generator_input` reads."""
    return [
        {"prompt": messages, "env_class": env_class, "env_extras": extras, "uid": uid}
        for messages, env_class, extras, uid in items
    ]


def _cell(source: Source, index: int, column: str) -> str:
    return f"{source.name}, row {index + 1}, column {column!r}"


def _message_problem(messages: Any) -> str | None:
    """Say what is wrong with the messages of a row; None when nothing is."""
    if not isinstance(messages, list):
        return f"must be a list of messages, not {type(messages).__name__}"
    if not messages:
        return "holds no messages"
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            return f"message {number} must be an object with role and content, not {type(message).__name__}"
        if not isinstance(message.get("role"), str):
            return f"message {number} has no role"
        if not isinstance(message.get("content"), str | list):
            return f"message {number} has no content"
    return None
