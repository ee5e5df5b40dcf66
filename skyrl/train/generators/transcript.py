"""The tokens of one rollout, and everything that training reads from them.

A rollout is an append-only list of segments. Concatenated, the segments before a call are the prompt that the
engine saw at that call; masks, log-probs and rewards are derived from them and so cannot get out of step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from skyrl.types.rollout import ConversationType

SegmentKind = Literal["prompt", "sampled", "observation", "scaffold"]
"""`scaffold` is what we add to keep the conversation well formed, such as an end-of-turn token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of tokens from one source."""

    kind: SegmentKind
    """Who wrote the tokens."""
    ids: tuple[int, ...]
    """The tokens."""
    logprobs: tuple[float, ...] | None = None
    """Nats, one per token of a sampled segment; None when the engine was not asked."""

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.ids):
            raise ValueError(f"{len(self.ids)} tokens came with {len(self.logprobs)} log-probs")


@dataclass(kw_only=True)
class TurnOutput:
    """One model call and what the environment made of it.

    Example: sampled `[1, 2, 3]`, then an end token 4 that we added, then an observation `[100, 101]`:
    `TurnOutput(output="...", output_ids=[1, 2, 3, 4], added_eos=True, obs_ids=[100, 101], reward=0.5)`.
    """

    output: str
    """Text of the response, as the environment read it (or replaced it)."""
    output_ids: list[int]
    """Sampled tokens, then those that stand for them or follow them without being sampled."""
    output_logprobs: list[float] | None = None
    """Nats, as long as `output_ids`, 0.0 for tokens that were not sampled; None when not asked for."""
    new_obs: ConversationType
    """Messages of the environment."""
    obs_ids: list[int]
    """Tokens of `new_obs`, the next generation prompt included."""
    reward: float | None = None
    """Reward of the step."""
    added_eos: bool = False
    """The last of `output_ids` is an end token that we added."""
    num_replaced: int = 0
    """How many of `output_ids`, before an added end token, come from text that the environment put in."""
    ended_by_stop_string: bool = False
    """The text ends with one of the stop strings."""

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return len(self.output_ids) - self.num_replaced - int(self.added_eos)

    def get_turn_loss_mask(self) -> list[int]:
        """Return 1 for sampled tokens and 0 for the rest of the turn."""
        unsampled = len(self.output_ids) - self.num_sampled + len(self.obs_ids)
        return [1] * self.num_sampled + [0] * unsampled

    def get_turn_rollout_logprobs(self) -> list[float] | None:
        """Return the log-probs of the turn, 0.0 on observation tokens; None when not asked for."""
        if self.output_logprobs is None:
            return None
        return self.output_logprobs + [0.0] * len(self.obs_ids)

    def segments(self) -> list[Segment]:
        """Split the turn by who wrote its tokens; empty parts are left out but for the sampled one."""
        cut = self.num_sampled
        logprobs = None if self.output_logprobs is None else tuple(self.output_logprobs[:cut])
        parts = [Segment(kind="sampled", ids=tuple(self.output_ids[:cut]), logprobs=logprobs)]
        if self.output_ids[cut:]:
            parts.append(Segment(kind="scaffold", ids=tuple(self.output_ids[cut:])))
        if self.obs_ids:
            parts.append(Segment(kind="observation", ids=tuple(self.obs_ids)))
        return parts


class Transcript:
    """A prompt and the turns after it.

    Example: `Transcript([1, 2])`, then `add_turn(...)` for every finished turn; `tokens` is the next prompt.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.segments: list[Segment] = [Segment(kind="prompt", ids=tuple(prompt_ids))]
        self._tokens: list[int] = list(prompt_ids)
        self._rewards: list[tuple[int, float]] = []

    @property
    def tokens(self) -> list[int]:
        """A copy of all tokens so far."""
        return list(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def add_turn(self, turn: TurnOutput) -> None:
        """Append a turn. Its reward belongs to its last sampled token."""
        if turn.reward:
            self._rewards.append((len(self.segments), float(turn.reward)))
        for segment in turn.segments():
            self.segments.append(segment)
            self._tokens.extend(segment.ids)

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens of the first call."""
        return list(self.segments[0].ids)

    @property
    def response_ids(self) -> list[int]:
        """Everything after the prompt."""
        return self._tokens[len(self.segments[0].ids) :]

    @property
    def loss_mask(self) -> list[int]:
        """1 on sampled tokens, aligned with the response."""
        return list(chain.from_iterable([int(part.kind == "sampled")] * len(part.ids) for part in self._response()))

    @property
    def rollout_logprobs(self) -> list[float] | None:
        """Nats, aligned with the response, 0.0 where nothing was sampled; None when a turn has none."""
        values: list[float] = []
        for part in self._response():
            if part.kind != "sampled":
                values.extend([0.0] * len(part.ids))
            elif part.logprobs is None:
                return None
            else:
                values.extend(part.logprobs)
        return values

    @property
    def token_rewards(self) -> list[float]:
        """Rewards, aligned with the response, each on the last sampled token of its turn.

        A turn that sampled nothing puts its reward on the last sampled token before it, or on the first token of
        the response. The sum is the sum of the step rewards; it needs a token to lie on.
        """
        ends = self._sampled_ends()
        rewards = [0.0] * (len(self._tokens) - len(self.segments[0].ids))
        for segment_index, reward in self._rewards:
            rewards[max(ends[segment_index] - 1, 0)] += reward
        return rewards

    def _response(self) -> Iterator[Segment]:
        return iter(self.segments[1:])

    def _sampled_ends(self) -> list[int]:
        """Per segment: how far the response has got at the last sampled token up to and including it."""
        ends, position, last = [0], 0, 0
        for part in self._response():
            position += len(part.ids)
            if part.kind == "sampled" and part.ids:
                last = position
            ends.append(last)
        return ends
