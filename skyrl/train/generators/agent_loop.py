"""One try of one rollout: environment and model take turns.

    open env ─▶ prompt ─▶ [ length check ─▶ model call ─▶ env step ]* ─▶ metrics ─▶ close, finish session

The loop fills an `Episode` as it goes, so that a caller still has what happened when it raises or is cancelled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from skyrl.train.generators.cancellation import finish_despite_cancellation
from skyrl.train.generators.engine import CallOptions, Completion, RolloutEngine
from skyrl.train.generators.env_session import EnvSession, EnvStep
from skyrl.train.generators.renderer import ChatRenderer
from skyrl.train.generators.sampling import call_params, stop_strings, turn_seed
from skyrl.train.generators.strategies import TokenStrategy
from skyrl.train.generators.transcript import Transcript, TurnOutput
from skyrl.types.rollout import ConversationType, TrajectoryID, Turn, classify_stop_reason

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """What one rollout is asked to do."""

    prompt: ConversationType
    """Messages of the dataset row; the loop works on its own copy."""
    env_class: str
    """Registered name of the environment."""
    env_config: Any
    """Its section of the configuration."""
    env_extras: dict[str, Any]
    """The dataset row without the prompt."""
    sampling_params: dict[str, Any]
    """Under the engine's names."""
    trajectory_id: TrajectoryID
    """Seeds and names the rollout."""
    session_id: str
    """Routes the turns; fresh for every try."""
    global_step: int | None = None
    """Part of the seed."""
    cache_salt: str | None = None
    """Separates prefix caches."""
    priority: int | None = None
    """Rank in the engine's queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLimits:
    """What ends a rollout besides its environment."""

    max_input_length: int | None
    """Most tokens of a model call's prompt; checked before the call."""
    max_model_len: int | None
    """Context of the engine in tokens, if known."""
    max_calls: int | None
    """Model calls at most; None leaves it to the environment."""
    continue_after_truncation: bool
    """Go on after a response that the length limit cut."""
    run_seed: int | None
    """Seeds the sampling; None leaves it to the engine."""


@dataclass(kw_only=True)
class Episode:
    """What has happened so far in one try."""

    prompt: ConversationType = field(default_factory=list)
    """The messages that the environment made of the prompt."""
    messages: ConversationType = field(default_factory=list)
    """The whole conversation."""
    transcript: Transcript | None = None
    """None until the prompt is rendered."""
    turns: list[Turn] = field(default_factory=list)
    """One per finished model call."""
    stop_reason: str = ""
    """Why it ended; empty while it runs."""
    prompt_too_long: bool = False
    """The first prompt was beyond the limit: no model call took place."""
    where: str = "start"
    """The step it is at."""
    weight_version: tuple[int, int] | None = None
    """At the first and the last model call."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, each summed over the steps."""
    env_metrics: dict[str, Any] = field(default_factory=dict)
    """From the environment, at the end."""
    llm_s: float = 0.0
    """Seconds in model calls."""
    env_s: float = 0.0
    """Seconds in the environment."""
    began_s: float = field(default_factory=time.monotonic)
    """Monotonic clock at the start."""

    def age_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.began_s


class AgentLoop:
    """Runs one try.

    Args:
        request: What to do.
        env: The environment, not yet opened.
        engine: Model calls.
        renderer: Renders the prompt.
        strategy: Joins turns.
        limits: What else ends the rollout.
        episode: Filled as the loop goes.
        first_call: Entered around the first model call; the deterministic mode holds it there until the whole
            batch is queued.
    """

    def __init__(
        self,
        request: EpisodeRequest,
        *,
        env: EnvSession,
        engine: RolloutEngine,
        renderer: ChatRenderer,
        strategy: TokenStrategy,
        limits: LoopLimits,
        episode: Episode,
        first_call: AbstractAsyncContextManager[None] | None = None,
    ) -> None:
        self._request = request
        self._env = env
        self._engine = engine
        self._renderer = renderer
        self._strategy = strategy
        self._limits = limits
        self._first_call = first_call if first_call is not None else nullcontext()
        self.episode = episode

    async def run(self) -> Episode:
        """Run to the end and return the episode. The environment is closed and the session finished in any case."""
        try:
            transcript = await self._open()
            await self._turns(transcript)
            self.episode.env_metrics = await self._env_call("env.get_metrics", self._env.metrics())
            return self.episode
        finally:
            await finish_despite_cancellation(self._close())

    async def _open(self) -> Transcript:
        episode, request = self.episode, self._request
        await self._env_call("env.make", self._env.open(request.env_config, request.env_extras))
        episode.prompt = await self._env_call("env.init", self._env.init(request.prompt))
        episode.messages = list(episode.prompt)
        episode.where = "render"
        episode.transcript = Transcript(self._renderer.prompt(episode.prompt))
        return episode.transcript

    async def _turns(self, transcript: Transcript) -> None:
        episode = self.episode
        if self._too_long(len(transcript)):
            episode.stop_reason, episode.prompt_too_long = "length", True
            return
        while True:
            completion = await self._complete(transcript)
            turn, done = await self._step(completion)
            truncated = classify_stop_reason(completion.stop_reason) == "truncated"
            episode.stop_reason = completion.stop_reason
            if done or (truncated and not self._limits.continue_after_truncation) or self._out_of_calls():
                break
            episode.where = "render"
            continued = self._strategy.continued(turn, truncated=truncated)
            if self._too_long(len(transcript) + len(continued.output_ids) + len(continued.obs_ids)):
                episode.stop_reason = "length"
                break
            transcript.add_turn(continued)
        transcript.add_turn(self._strategy.last(turn, stop_reason=episode.stop_reason))

    async def _complete(self, transcript: Transcript) -> Completion:
        episode, request, turn_index = self.episode, self._request, len(self.episode.turns)
        identity = request.trajectory_id
        seed = turn_seed(
            self._limits.run_seed, identity.instance_id, identity.repetition_id, turn_index, request.global_step
        )
        options = CallOptions(
            sampling_params=call_params(
                request.sampling_params,
                prompt_len=len(transcript),
                max_model_len=self._limits.max_model_len,
                seed=seed,
            ),
            session_id=request.session_id,
            cache_salt=request.cache_salt,
            priority=request.priority,
        )
        episode.where = "engine"
        version_before = self._engine.weight_version()
        began = time.monotonic()
        async with self._first_call if turn_index == 0 else nullcontext():
            completion = await self._engine.complete(transcript.tokens, options)
        took = time.monotonic() - began
        episode.llm_s += took
        version_after = self._engine.weight_version()
        if version_before is not None and version_after is not None:
            first = version_before if episode.weight_version is None else episode.weight_version[0]
            episode.weight_version = (first, version_after)
        episode.turns.append(
            Turn(
                prompt_len=len(transcript),
                n_sampled=len(completion.ids),
                stop_reason=completion.stop_reason,
                reward=0.0,
                t_llm=took,
                t_env=0.0,
            )
        )
        return completion

    async def _step(self, completion: Completion) -> tuple[TurnOutput, bool]:
        episode = self.episode
        before = episode.env_s
        step = await self._env_call("env.step", self._env.step(completion.text))
        turn = self._turn_output(completion, step)
        for name, value in step.reward_parts.items():
            episode.reward_parts[name] = episode.reward_parts.get(name, 0.0) + value
        last = episode.turns[-1]
        episode.turns[-1] = Turn(
            prompt_len=last.prompt_len,
            n_sampled=last.n_sampled,
            stop_reason=last.stop_reason,
            reward=step.reward,
            t_llm=last.t_llm,
            t_env=episode.env_s - before,
        )
        episode.messages.append({"role": "assistant", "content": self._without_eos(turn.output)})
        episode.messages.extend(step.observations)
        return turn, step.done

    def _turn_output(self, completion: Completion, step: EnvStep) -> TurnOutput:
        stops = tuple(stop_strings(self._request.sampling_params))
        turn = TurnOutput(
            output=completion.text,
            output_ids=list(completion.ids),
            output_logprobs=None if completion.logprobs is None else list(completion.logprobs),
            new_obs=step.observations,
            obs_ids=[],
            reward=step.reward,
            ended_by_stop_string=bool(stops) and completion.text.endswith(stops),
        )
        if step.postprocessed_action is None:
            return turn
        logger.warning(
            "environment %r replaced a response (postprocessed_action): the tokens that were not sampled don't train",
            self._request.env_class,
        )
        return self._replaced(turn, step.postprocessed_action)

    def _replaced(self, turn: TurnOutput, text: str) -> TurnOutput:
        """Encode the environment's text; of its tokens those that the policy sampled first keep their log-probs."""
        ids = list(self._renderer.tokenizer.encode(text, add_special_tokens=False))
        shared = 0
        while shared < min(len(ids), len(turn.output_ids)) and ids[shared] == turn.output_ids[shared]:
            shared += 1
        replaced = len(ids) - shared
        logprobs = None if turn.output_logprobs is None else turn.output_logprobs[:shared] + [0.0] * replaced
        return TurnOutput(
            output=text,
            output_ids=ids,
            output_logprobs=logprobs,
            new_obs=turn.new_obs,
            obs_ids=[],
            reward=turn.reward,
            num_replaced=replaced,
            ended_by_stop_string=turn.ended_by_stop_string,
        )

    async def _env_call(self, where: str, call: Awaitable[T]) -> T:
        self.episode.where = where
        began = time.monotonic()
        try:
            return await call
        finally:
            self.episode.env_s += time.monotonic() - began

    async def _close(self) -> None:
        try:
            await self._env.close()
        finally:
            await self._engine.client.finish_session(self._request.session_id)

    def _too_long(self, num_tokens: int) -> bool:
        limit, context = self._limits.max_input_length, self._limits.max_model_len
        return (limit is not None and num_tokens > limit) or (context is not None and num_tokens >= context)

    def _out_of_calls(self) -> bool:
        return self._limits.max_calls is not None and len(self.episode.turns) >= self._limits.max_calls

    def _without_eos(self, text: str) -> str:
        eos = self._renderer.tokenizer.eos_token
        return text.removesuffix(eos) if isinstance(eos, str) else text
