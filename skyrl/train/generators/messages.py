"""Tokens and loss masks of chat messages, for generators that only have the text.

Prefer token ids from the engine: text that is tokenised again need not give the tokens that were sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.errors import ConfigError
from skyrl.train.generators.renderer import FIXED_CONVERSATIONS, TEMPLATE_ERRORS, render
from skyrl.types.rollout import ConversationType, MessageType


def get_generation_prompt_ids(tokenizer: Any, tokenizer_kwargs: Mapping[str, Any] | None = None) -> list[int]:
    """Return the tokens that the template puts before an assistant's answer.

    Args:
        tokenizer: A transformers tokenizer with a chat template.
        tokenizer_kwargs: Variables for the template; `enable_thinking` is refused, since it moves part of the
            answer into the generation prompt.
    """
    if tokenizer_kwargs and "enable_thinking" in tokenizer_kwargs:
        raise AssertionError("enable_thinking changes the generation prompt; leave it out here")
    empty = [{"role": "user", "content": ""}]
    without = render(tokenizer, empty, add_generation_prompt=False, template_kwargs=tokenizer_kwargs)
    return render(tokenizer, empty, add_generation_prompt=True, template_kwargs=tokenizer_kwargs)[len(without) :]


def encode_messages_subset(
    messages: ConversationType, tokenizer: Any, tokenizer_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Return the tokens of messages as the continuation of a conversation: no injected system prompt.

    The separator after an earlier end token belongs to what stands before, so it is not part of the result.
    """
    if not messages:
        raise AssertionError("messages must not be empty")
    return _Continuation(tokenizer, tokenizer_kwargs).encode(messages)


def get_response_ids_and_loss_mask_from_messages(
    messages: ConversationType,
    tokenizer: Any,
    assistant_logprobs: Sequence[Sequence[float]] | None = None,
    tokenizer_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[int], list[float] | None]:
    """Return tokens, loss mask and log-probs of a conversation's messages after the prompt.

    Args:
        messages: User, tool and assistant messages, in order.
        tokenizer: A transformers tokenizer with a chat template.
        assistant_logprobs: Nats, one list per assistant message, one number per token of its content, end token
            included; None when there are none.
        tokenizer_kwargs: Variables for the template.

    Returns:
        Token ids; 1 on the content of assistant messages through its end token, else 0; log-probs with 0.0 where
        the mask is 0, or None.

    Raises:
        ValueError: A message has another role, or the log-probs do not match the messages.
    """
    if not messages:
        raise AssertionError("messages must not be empty")
    for message in messages:
        if message["role"] not in ("user", "tool", "assistant"):
            raise ValueError(f"role {message['role']!r}: only user, tool and assistant messages follow a prompt")
    continuation = _Continuation(tokenizer, tokenizer_kwargs)
    num_assistant = sum(message["role"] == "assistant" for message in messages)
    if assistant_logprobs is not None and len(assistant_logprobs) != num_assistant:
        raise ValueError(f"{len(assistant_logprobs)} lists of log-probs for {num_assistant} assistant messages")
    remaining = iter(assistant_logprobs if assistant_logprobs is not None else [])
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for message in messages:
        message_ids = continuation.encode([message])
        start, end = continuation.trained_span(message, message_ids)
        ids += message_ids
        mask += [0] * start + [1] * (end - start) + [0] * (len(message_ids) - end)
        values: Sequence[float] = [0.0] * (end - start)
        if message["role"] == "assistant" and assistant_logprobs is not None:
            values = next(remaining)
            if len(values) != end - start:
                raise ValueError(f"{len(values)} log-probs for {end - start} tokens of an assistant message")
        logprobs += [0.0] * start + list(values) + [0.0] * (len(message_ids) - end)
    return ids, mask, logprobs if assistant_logprobs is not None else None


class _Continuation:
    """Encodes messages behind a fixed conversation; a separator stays with the message that it ends."""

    def __init__(self, tokenizer: Any, tokenizer_kwargs: Mapping[str, Any] | None) -> None:
        self._tokenizer = tokenizer
        self._kwargs = tokenizer_kwargs
        self._header = get_generation_prompt_ids(tokenizer, tokenizer_kwargs)

    def encode(self, messages: ConversationType) -> list[int]:
        """Return the tokens of the messages.

        Raises:
            ConfigError: The template takes them behind none of the fixed conversations.
        """
        bases = FIXED_CONVERSATIONS
        if messages[0]["role"] == "assistant":  # an answer needs a question before it
            bases = tuple(base for base in bases if base[-1]["role"] == "user")
        for base in bases:
            try:
                prefix = self._render(base)
                ids = self._render([*base, *messages])
            except TEMPLATE_ERRORS:
                continue
            if ids[: len(prefix)] == prefix:
                return ids[len(prefix) :]
        roles = [message["role"] for message in messages]
        raise ConfigError(f"the tokenizer's chat template can't encode messages of the roles {roles} on their own")

    def trained_span(self, message: MessageType, ids: list[int]) -> tuple[int, int]:
        """Return where the assistant's own tokens begin and end within the message; (0, 0) for other roles."""
        if message["role"] != "assistant":
            return 0, 0
        start = 0
        while start < len(self._header) and ids[start : start + 1] == self._header[start : start + 1]:
            start += 1
        eos = self._tokenizer.eos_token_id
        end = len(ids) - list(reversed(ids)).index(eos) if eos in ids else len(ids)
        return start, end

    def _render(self, messages: ConversationType) -> list[int]:
        return render(self._tokenizer, messages, add_generation_prompt=False, template_kwargs=self._kwargs)
