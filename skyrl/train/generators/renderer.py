"""From chat messages to tokens, through the tokenizer's own chat template.

The first prompt is rendered whole. Later messages are rendered behind a fixed conversation whose tokens are then
cut off, so that nothing that was sampled is ever tokenised again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from skyrl.errors import ConfigError
from skyrl.types.rollout import ConversationType

logger = logging.getLogger(__name__)

_SYSTEM = {"role": "system", "content": "You answer questions."}
_USER = {"role": "user", "content": "Are you there?"}
_ASSISTANT = {"role": "assistant", "content": "Yes."}
_PROBE = {"role": "user", "content": "Go on."}

# Tried in this order. Templates differ in what they allow (no system message, strict alternation) and in whether an
# assistant message looks the same once another message follows it (thinking templates).
FIXED_CONVERSATIONS: tuple[ConversationType, ...] = (
    [_SYSTEM, _USER, _ASSISTANT],
    [_USER, _ASSISTANT],
    [_SYSTEM, _USER],
    [_USER],
)

# What a template raises about messages that it does not take.
TEMPLATE_ERRORS = (jinja2.TemplateError, ValueError, TypeError, KeyError)


def render(
    tokenizer: Any,
    messages: ConversationType,
    *,
    add_generation_prompt: bool,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the tokens of a conversation."""
    ids = tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=add_generation_prompt,
        tokenize=True,
        return_dict=False,
        **(template_kwargs or {}),
    )
    return list(ids)


class ChatRenderer:
    """Renders prompts whole, and observations as a continuation of tokens that the engine has seen.

    Args:
        tokenizer: A transformers tokenizer with a chat template.
        template_kwargs: Variables for the template, passed at every call.
        multi_turn: Whether the run needs observations. If so, a template for which no fixed conversation works is
            refused here; if not, only when an observation comes up.

    Raises:
        ConfigError: No fixed conversation works and `multi_turn` is set.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None, *, multi_turn: bool) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.base_conversation: ConversationType = []
        self.base_token_ids: list[int] | None = None
        for base in FIXED_CONVERSATIONS:
            prefix = self._verified_prefix(base)
            if prefix is not None:
                self.base_conversation, self.base_token_ids = base, prefix
                break
        if self.base_token_ids is None and multi_turn:
            raise ConfigError(self._refusal())
        self.generation_prompt_ids = self._suffix([{"role": "user", "content": ""}])
        self.turn_end_id = self._turn_end_id()

    def prompt(self, messages: ConversationType) -> list[int]:
        """Return the tokens of a whole conversation, generation prompt included."""
        return self._render(messages, add_generation_prompt=True)

    def observation(self, messages: ConversationType) -> list[int]:
        """Return the tokens that follow an assistant's end token: separator, messages, generation prompt.

        Raises:
            ConfigError: The template has no usable fixed conversation, or renders these messages such that they
                change what stands before them.
        """
        if self.base_token_ids is None:
            raise ConfigError(self._refusal())
        ids = self._render([*self.base_conversation, *messages], add_generation_prompt=True)
        if ids[: len(self.base_token_ids)] != self.base_token_ids:
            roles = [message.get("role") for message in messages]
            raise ConfigError(
                f"the chat template changes earlier messages when messages of the roles {roles} follow, so they can't "
                "be appended to sampled tokens; use generator.use_conversation_multi_turn=false or another template"
            )
        return ids[len(self.base_token_ids) :]

    def encode_text(self, messages: ConversationType) -> list[int]:
        """Return the tokens of the contents alone, without roles; for one continued assistant message."""
        ids: list[int] = []
        for message in messages:
            ids.extend(self.tokenizer.encode(message["content"], add_special_tokens=False))
        return ids

    def _render(self, messages: ConversationType, *, add_generation_prompt: bool) -> list[int]:
        return render(
            self.tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=self.template_kwargs,
        )

    def _suffix(self, messages: ConversationType) -> list[int]:
        try:
            without = self._render(messages, add_generation_prompt=False)
            return self._render(messages, add_generation_prompt=True)[len(without) :]
        except TEMPLATE_ERRORS as cause:
            raise ConfigError(f"the tokenizer's chat template does not render one user message: {cause}") from cause

    def _verified_prefix(self, base: ConversationType) -> list[int] | None:
        """Return the tokens of the base up to its last end token, if later messages leave them as they are."""
        try:
            ids = self._render(base, add_generation_prompt=False)
            prefix = ids[: self._end_of_last_turn(base, ids)]
            followed = self._render([*base, _PROBE], add_generation_prompt=True)
        except TEMPLATE_ERRORS as cause:
            logger.debug("chat template refuses %s: %s", [message["role"] for message in base], cause)
            return None
        return prefix if followed[: len(prefix)] == prefix else None

    def _end_of_last_turn(self, base: ConversationType, ids: Sequence[int]) -> int:
        """Return how many tokens of the base to keep: what follows its last end token belongs to the next message."""
        eos = self.tokenizer.eos_token_id
        if eos in ids:
            return len(ids) - list(reversed(ids)).index(eos)
        # The template ends its turns with another token than the tokenizer's: the last special one after the content.
        other = self._render([*base[:-1], {**base[-1], "content": "No?"}], add_generation_prompt=False)
        shared = 0
        while shared < min(len(ids), len(other)) and ids[-1 - shared] == other[-1 - shared]:
            shared += 1
        special = set(self.tokenizer.all_special_ids)
        for position in range(len(ids) - 1, len(ids) - 1 - shared, -1):
            if ids[position] in special:
                return position + 1
        return len(ids)

    def _turn_end_id(self) -> int:
        eos: int = self.tokenizer.eos_token_id
        if not self.base_token_ids or eos in self.base_token_ids:
            return eos
        last = self.base_token_ids[-1]
        return last if last in set(self.tokenizer.all_special_ids) else eos

    def _refusal(self) -> str:
        return (
            "the tokenizer's chat template can't be continued message by message: whatever conversation stands first, "
            "it is refused or re-rendered once a user message follows; use generator.use_conversation_multi_turn=false "
            "or another template"
        )
