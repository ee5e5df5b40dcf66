"""The generator that lets the policy play `skyrl_gym` environments.

A batch becomes one agent loop per row (`agent_loop`), collected under the failure policy (`collector`), and then
columns (`trajectory`). This class wires them up from the configuration and holds the hooks for subclasses.
"""

from __future__ import annotations

import copy
import os
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.config.environment import SkyRLGymConfig
from skyrl.config.generator import GeneratorConfig
from skyrl.train.generators.agent_loop import AgentLoop, EpisodeRequest, LoopLimits
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput
from skyrl.train.generators.batch import RolloutBatch
from skyrl.train.generators.collector import Collector, FailurePolicy, RolloutContext
from skyrl.train.generators.columns import recomputed_metrics
from skyrl.train.generators.engine import RolloutEngine
from skyrl.train.generators.env_session import EnvSession
from skyrl.train.generators.env_threads import EnvThreadPool
from skyrl.train.generators.masks import apply_overlong_filtering, zero_rewards_on_non_stop
from skyrl.train.generators.renderer import ChatRenderer
from skyrl.train.generators.reward_parts import zero_parts_on_non_stop
from skyrl.train.generators.sampling import normalize_sampling_params, wants_logprobs
from skyrl.train.generators.settings import check_room_to_queue, check_settings
from skyrl.train.generators.start_gate import StartGate
from skyrl.train.generators.strategies import ConversationStrategy, SingleMessageStrategy, TokenStrategy
from skyrl.train.generators.trajectory import (
    RowStyle,
    StepWiseOutput,
    TrajectoryOutput,
    finished_row,
    placeholder_row,
    rollout_record,
    to_columns,
)
from skyrl.train.generators.transcript import TurnOutput
from skyrl.train.utils.rate_limiter import RateLimiterConfig, create_rate_limiter
from skyrl.types.rollout import ConversationType, Failure, TrajectoryID

if TYPE_CHECKING:
    from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInterface

__all__ = [
    "GeneratorInput",
    "GeneratorOutput",
    "SkyRLGymGenerator",
    "StepWiseOutput",
    "TrajectoryOutput",
    "TurnOutput",
]


class SkyRLGymGenerator(GeneratorInterface):
    """Rolls out chat environments, token ids in and token ids out.

    Args:
        generator_cfg: `generator`.
        skyrl_gym_cfg: `environment.skyrl_gym`; its section of an environment's name goes to that environment.
        inference_engine_client: Answers token ids with token ids.
        tokenizer: A transformers tokenizer with a chat template.
        policy_model_name: Model to ask the client for; part of the cache salt. None means the client's own.
        seed: Run seed, from which every model call's seed follows. None leaves sampling to the engine.

    Raises:
        ConfigError: Settings contradict each other, ask for what is not built, or the chat template can't be
            continued message by message although the run needs it.
    """

    def __init__(
        self,
        generator_cfg: GeneratorConfig,
        skyrl_gym_cfg: SkyRLGymConfig,
        inference_engine_client: InferenceEngineInterface,
        tokenizer: Any,
        policy_model_name: str | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        check_settings(generator_cfg, inference_engine_client)
        self.generator_cfg = generator_cfg
        self.skyrl_gym_cfg = skyrl_gym_cfg
        self.inference_engine_client = inference_engine_client
        self.tokenizer = tokenizer
        self.policy_model_name = policy_model_name
        self.seed = seed
        self.max_turns = generator_cfg.max_turns
        self.batched = generator_cfg.batched
        self.use_conversation_multi_turn = generator_cfg.use_conversation_multi_turn
        self.custom_chat_template: str | None = None
        self.on_rollout_done: Callable[[], None] = lambda: None
        self.env_executor: EnvThreadPool | None = EnvThreadPool(_num_env_threads(skyrl_gym_cfg.max_env_workers))
        self._renderer = ChatRenderer(
            tokenizer,
            generator_cfg.chat_template_kwargs,
            multi_turn=self.use_conversation_multi_turn and self.max_turns > 1 and not self.batched,
        )
        self._policy = FailurePolicy(
            max_attempts=generator_cfg.max_attempts,
            on_error=generator_cfg.on_error,  # type: ignore[arg-type]  # checked by FailurePolicy
            max_failed_fraction=generator_cfg.max_failed_fraction,
            timeout_s=generator_cfg.trajectory_timeout_s,
        )
        limits = generator_cfg.rate_limit
        self._limiter = create_rate_limiter(
            RateLimiterConfig(limits.enabled, limits.trajectories_per_second, limits.max_concurrency)
        )

    @property
    def base_conversation(self) -> ConversationType:
        """The fixed conversation behind which observations are rendered."""
        return self._renderer.base_conversation

    @base_conversation.setter
    def base_conversation(self, messages: ConversationType) -> None:
        self._renderer.base_conversation = messages

    @property
    def base_conversation_token_ids(self) -> list[int]:
        """Its tokens up to the last end token, which are cut off; `[]` cuts nothing."""
        return self._renderer.base_token_ids or []

    @base_conversation_token_ids.setter
    def base_conversation_token_ids(self, ids: list[int]) -> None:
        self._renderer.base_token_ids = ids

    @property
    def generation_prompt_ids(self) -> list[int]:
        """What the template puts before an assistant's answer."""
        return self._renderer.generation_prompt_ids

    @generation_prompt_ids.setter
    def generation_prompt_ids(self, ids: list[int]) -> None:
        self._renderer.generation_prompt_ids = ids

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        """Roll out every prompt.

        Args:
            input_batch: The prompts.
            disable_tqdm: Accepted as upstream does; progress goes to `on_rollout_done`.

        Raises:
            RolloutError: More rollouts failed than the configuration allows.
            ValueError: The batch contradicts itself.
        """
        batch = self._new_batch(input_batch)
        collector = Collector(
            self._policy,
            self._limiter,
            run_try=partial(self._run_try, batch),
            make_failed=partial(self._failed_row, batch),
            on_done=self.on_rollout_done,
        )
        outputs = await collector.collect(batch.context, len(batch.prompts), batch.gate)
        records = [
            rollout_record(output, prompt=prompt, env_class=env_class, trajectory_id=trajectory_id)
            for output, prompt, env_class, trajectory_id in zip(
                outputs, batch.prompts, batch.env_classes, batch.trajectory_ids, strict=True
            )
        ]
        columns = to_columns(outputs, records, logprobs=batch.logprobs, weight_version=batch.weight_version)
        columns["rollout_metrics"] = recomputed_metrics(columns) | _failure_metrics(outputs)
        return self._filtered(columns)

    async def agent_loop(
        self,
        prompt: ConversationType,
        env_class: str,
        env_extras: dict[str, Any],
        max_tokens: int | None,
        max_input_length: int | None,
        sampling_params: dict[str, Any] | None = None,
        trajectory_id: TrajectoryID | None = None,
        context: RolloutContext | None = None,
    ) -> TrajectoryOutput:
        """Run one try of one rollout.

        Args:
            prompt: Messages of the dataset row.
            env_class: Registered name of the environment.
            env_extras: The dataset row without the prompt.
            max_tokens: Most tokens of one response.
            max_input_length: Most tokens of a model call's prompt.
            sampling_params: Under the engine's names; None takes the configured ones.
            trajectory_id: Names and seeds the rollout.
            context: Its place in the batch.

        Raises:
            Exception: Whatever the environment or the engine raised, after both were cleaned up.
        """
        context = context if context is not None else RolloutContext(cache_salt=self._cache_salt())
        params = dict(sampling_params if sampling_params is not None else self._configured_params())
        params = normalize_sampling_params(params, 1)[0] | {"max_tokens": max_tokens}
        identity = trajectory_id if trajectory_id is not None else TrajectoryID(str(context.index), 0)
        extras = self._setup_env_extras(env_class, self._extras(env_extras), params, identity)
        loop = AgentLoop(
            EpisodeRequest(
                prompt=copy.deepcopy(prompt),
                env_class=env_class,
                env_config=self._env_config(env_class),
                env_extras=extras,
                sampling_params=params,
                trajectory_id=identity,
                session_id=_session_id(trajectory_id, context.attempt),
                global_step=context.global_step,
                cache_salt=context.cache_salt,
                priority=context.index if context.gate is not None else None,
            ),
            env=EnvSession(env_class, self.env_executor, self.generator_cfg.env_timeout_s),
            engine=RolloutEngine(self.inference_engine_client, self.policy_model_name),
            renderer=self._renderer,
            strategy=self._strategy(),
            limits=self._limits(max_input_length),
            episode=context.episode,
            first_call=context.gate.first_call() if context.gate is not None else None,
        )
        started = time.time()
        episode = await loop.run()
        output = finished_row(episode, self._row_style(params))
        output.attempt, output.t_start = context.attempt, started
        output.t_end = started + episode.age_s()
        return self._post_process_agent_loop_output(output, extras, trajectory_id)

    def _setup_env_extras(
        self,
        env_class: str,
        env_extras: dict[str, Any],
        sampling_params: dict[str, Any],
        trajectory_id: TrajectoryID | None,
    ) -> dict[str, Any]:
        """Hook: change the extras (a copy) before the environment is made."""
        return env_extras

    def _post_process_agent_loop_output(
        self, output: TrajectoryOutput, env_extras: dict[str, Any], trajectory_id: TrajectoryID | None
    ) -> TrajectoryOutput:
        """Hook: change a finished rollout, rewards placed."""
        return output

    def _new_batch(self, input_batch: GeneratorInput) -> RolloutBatch:
        prompts = input_batch["prompts"]
        given = input_batch.get("sampling_params")
        metadata = input_batch.get("batch_metadata")
        return RolloutBatch(
            prompts=prompts,
            env_classes=input_batch["env_classes"],
            env_extras=input_batch.get("env_extras") or [{} for _ in prompts],
            sampling_params=normalize_sampling_params(
                given if given is not None else self._configured_params(), len(prompts)
            ),
            trajectory_ids=input_batch.get("trajectory_ids") or [None for _ in prompts],
            global_step=metadata.global_step if metadata is not None else None,
            cache_salt=self._cache_salt(),
            weight_version=RolloutEngine(self.inference_engine_client).weight_version(),
            gate=self._new_gate(len(prompts)),
        )

    async def _run_try(self, batch: RolloutBatch, context: RolloutContext) -> TrajectoryOutput:
        row = context.index
        return await self.agent_loop(
            batch.prompts[row],
            batch.env_classes[row],
            batch.env_extras[row],
            max_tokens=batch.sampling_params[row].get("max_tokens"),
            max_input_length=self.generator_cfg.max_input_length,
            sampling_params=batch.sampling_params[row],
            trajectory_id=batch.trajectory_ids[row],
            context=context,
        )

    def _failed_row(
        self, batch: RolloutBatch, context: RolloutContext, failure: Failure, stop_reason: str
    ) -> TrajectoryOutput:
        style = self._row_style(batch.sampling_params[context.index])
        output = placeholder_row(context.episode, style, stop_reason=stop_reason)
        output.failure, output.attempt, output.t_end = failure, context.attempt, time.time()
        output.t_start = output.t_end - context.episode.age_s()
        return output

    def _configured_params(self) -> dict[str, Any]:
        backend = self.generator_cfg.inference_engine.backend
        return get_sampling_params_for_backend(backend, self.generator_cfg.sampling_params)

    def _cache_salt(self) -> str | None:
        version = RolloutEngine(self.inference_engine_client).weight_version()
        if not self.generator_cfg.use_cache_salt or version is None:
            return None
        return f"{self.policy_model_name}@{version}" if self.policy_model_name else str(version)

    def _new_gate(self, num_rows: int) -> StartGate | None:
        if not self.generator_cfg.deterministic:
            return None
        check_room_to_queue(self.generator_cfg, num_rows)
        timeout_s = self.generator_cfg.inference_engine.control_timeout_s
        return StartGate(self.inference_engine_client, num_rows, timeout_s)  # type: ignore[arg-type]  # check_settings

    def _extras(self, env_extras: dict[str, Any]) -> dict[str, Any]:
        """Copy the extras and set `max_turns`: the row's own wins when it is smaller, or when the run's is default."""
        extras = copy.deepcopy(env_extras)
        limit = 1 if self.batched else self.max_turns
        own = extras.get("max_turns")
        default = self.max_turns == GeneratorConfig.max_turns and not self.batched
        extras["max_turns"] = own if own is not None and (own < limit or default) else limit
        return extras

    def _env_config(self, env_class: str) -> Any:
        # Sections of environments are open: one that has none gets an empty mapping.
        return getattr(self.skyrl_gym_cfg, env_class, {})

    def _strategy(self) -> TokenStrategy:
        eos = self.tokenizer.eos_token_id
        if not self.use_conversation_multi_turn:
            return SingleMessageStrategy(self._renderer, eos_token_id=eos)
        closes = self.generator_cfg.append_eos_token_after_stop_str_in_multi_turn
        return ConversationStrategy(self._renderer, eos_token_id=eos, stop_strings_end_turns=closes)

    def _limits(self, max_input_length: int | None) -> LoopLimits:
        return LoopLimits(
            max_input_length=max_input_length,
            max_model_len=(self.generator_cfg.inference_engine.engine_init_kwargs or {}).get("max_model_len"),
            max_calls=1 if self.batched else None,
            continue_after_truncation=self.generator_cfg.continue_after_truncation,
            run_seed=self.seed,
        )

    def _row_style(self, params: dict[str, Any]) -> RowStyle:
        pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        return RowStyle(
            scalar_rewards=self.batched, logprobs=wants_logprobs(params), pad_token_id=pad if pad is not None else eos
        )

    def _filtered(self, columns: GeneratorOutput) -> GeneratorOutput:
        reasons = columns["stop_reasons"] or []
        if self.generator_cfg.zero_reward_on_non_stop:
            columns["rewards"] = zero_rewards_on_non_stop(columns["rewards"], reasons)
            columns["reward_components"] = zero_parts_on_non_stop(columns.get("reward_components"), reasons)
        if self.generator_cfg.apply_overlong_filtering:
            columns["loss_masks"] = apply_overlong_filtering(columns["loss_masks"], reasons)
        return columns


def _num_env_threads(max_env_workers: int) -> int:
    """0 asks for no limit of ours: the number that Python's own pool takes."""
    return max_env_workers if max_env_workers > 0 else min(32, (os.cpu_count() or 1) + 4)


def _session_id(trajectory_id: TrajectoryID | None, attempt: int) -> str:
    name = trajectory_id.to_string() if trajectory_id is not None else uuid.uuid4().hex
    return name if attempt == 1 else f"{name}_try{attempt}"


def _failure_metrics(outputs: list[TrajectoryOutput]) -> dict[str, float]:
    """Count what went wrong; reported always, so that a healthy run shows zeros."""
    failures = [output.failure for output in outputs if output.failure is not None]
    return {
        "generate/num_failed": float(len(failures)),
        "generate/num_env_errors": float(sum(failure.where.startswith("env.") for failure in failures)),
        "generate/num_retried": float(sum(output.attempt > 1 for output in outputs)),
        "generate/num_prompt_too_long": float(sum(output.episode.prompt_too_long for output in outputs)),
    }
