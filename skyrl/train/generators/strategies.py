"""How a turn's tokens and an observation become the next prompt.

A strategy is chosen once, when the generator is built. Both keep the sampled ids; they differ in what stands
between two turns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from skyrl.train.generators.renderer import ChatRenderer
from skyrl.train.generators.transcript import TurnOutput


class TokenStrategy(Protocol):
    """Turns a finished model call into what the transcript gets."""

    def continued(self, turn: TurnOutput, *, truncated: bool) -> TurnOutput:
        """Return the turn as it stands before another call: end token, observation and generation prompt added."""
        ...

    def last(self, turn: TurnOutput, *, stop_reason: str) -> TurnOutput:
        """Return the turn as it ends the rollout: nothing follows it."""
        ...


class ConversationStrategy:
    """One message per turn.

    Next prompt: previous tokens, sampled tokens, the rendered observation with the next generation prompt.

    Args:
        renderer: Renders observations.
        eos_token_id: Added after a turn that a stop string ended.
        stop_strings_end_turns: Whether to add it.
    """

    def __init__(self, renderer: ChatRenderer, *, eos_token_id: int, stop_strings_end_turns: bool) -> None:
        self._renderer = renderer
        self._eos = eos_token_id
        self._stop_strings_end_turns = stop_strings_end_turns

    def continued(self, turn: TurnOutput, *, truncated: bool) -> TurnOutput:
        """See `TokenStrategy`. A turn that was cut by length gets the template's end token."""
        closed = _append_token(turn, self._renderer.turn_end_id) if truncated else self._closed(turn)
        observation = (
            self._renderer.observation(turn.new_obs) if turn.new_obs else list(self._renderer.generation_prompt_ids)
        )
        return replace(closed, obs_ids=observation)

    def last(self, turn: TurnOutput, *, stop_reason: str) -> TurnOutput:
        """See `TokenStrategy`."""
        return replace(self._closed(turn), obs_ids=[])

    def _closed(self, turn: TurnOutput) -> TurnOutput:
        ended = turn.output_ids[-1:] == [self._eos]
        if turn.ended_by_stop_string and self._stop_strings_end_turns and not ended:
            return _append_token(turn, self._eos)
        return turn


class SingleMessageStrategy:
    """One assistant message that observations are written into.

    Next prompt: previous tokens, sampled tokens without their end token, the observation's bare text.
    """

    def __init__(self, renderer: ChatRenderer, *, eos_token_id: int) -> None:
        self._renderer = renderer
        self._eos = eos_token_id

    def continued(self, turn: TurnOutput, *, truncated: bool) -> TurnOutput:
        """See `TokenStrategy`."""
        return replace(self._reopened(turn), obs_ids=self._renderer.encode_text(turn.new_obs))

    def last(self, turn: TurnOutput, *, stop_reason: str) -> TurnOutput:
        """See `TokenStrategy`. An end token that was sampled stays; a missing one is added, untrained."""
        ended = turn.output_ids[-1:] == [self._eos]
        closed = turn if ended or stop_reason == "length" else _append_token(turn, self._eos)
        return replace(closed, obs_ids=[])

    def _reopened(self, turn: TurnOutput) -> TurnOutput:
        if turn.output_ids[-1:] != [self._eos]:
            return turn
        logprobs = None if turn.output_logprobs is None else turn.output_logprobs[:-1]
        replaced = max(turn.num_replaced - 1, 0)
        return replace(turn, output_ids=turn.output_ids[:-1], output_logprobs=logprobs, num_replaced=replaced)


def _append_token(turn: TurnOutput, token_id: int) -> TurnOutput:
    logprobs = None if turn.output_logprobs is None else [*turn.output_logprobs, 0.0]
    return replace(turn, output_ids=[*turn.output_ids, token_id], output_logprobs=logprobs, added_eos=True)
