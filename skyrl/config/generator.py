"""Settings of rollouts (`generator`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyrl.config.base import BaseConfig
from skyrl.config.inference_engine import InferenceEngineConfig


@dataclass
class SamplingParams(BaseConfig):
    """How tokens are drawn (`generator.sampling_params`, `generator.eval_sampling_params`)."""

    max_generate_length: int | None = 1024
    """Most tokens of one response; null in ``eval_sampling_params`` means that of training."""
    repetition_penalty: float = 1.0
    """Divisor of the logits of tokens seen before; 1 is off."""
    temperature: float = 1.0
    """Divisor of the logits; 0 picks the likeliest token."""
    top_p: float = 1.0
    """Keep the likeliest tokens up to this mass."""
    min_p: float = 0.0
    """Keep tokens at least this likely, relative to the likeliest."""
    top_k: int = -1
    """Keep this many tokens; -1 means all."""
    logprobs: int | None = 1
    """Return the log-prob of the chosen token (0 or 1), or none (null)."""
    stop: list[str] | None = None
    """Strings that end a response; they stay in it."""
    additional_kwargs: dict[str, Any] | None = field(default_factory=dict)
    """Further request fields; they never replace the fields above."""


def default_eval_sampling_params() -> SamplingParams:
    """Greedy decoding, as long as in training."""
    return SamplingParams(temperature=0.0, max_generate_length=None)


@dataclass
class ChatTemplateConfig(BaseConfig):
    """A chat template other than the tokenizer's (`generator.chat_template`)."""

    source: str = "name"
    """Where the template comes from: ``name`` (built in) or ``file``."""
    name_or_path: str | None = None
    """Built-in name or path of a Jinja file; None means the tokenizer's template."""


@dataclass
class RateLimitConfig(BaseConfig):
    """Throttling of rollouts (`generator.rate_limit`)."""

    enabled: bool = False
    """Limit how rollouts start."""
    trajectories_per_second: float | None = None
    """Rollouts started per second; None means no limit."""
    max_concurrency: int | None = None
    """Rollouts under way at one time; None means no limit."""


@dataclass
class GeneratorConfig(BaseConfig):
    """How prompts become rollouts (`generator`)."""

    inference_engine: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    """Engines and weight sync."""
    n_samples_per_prompt: int = 5
    """Rollouts of one training prompt."""
    eval_n_samples_per_prompt: int = 1
    """Rollouts of one evaluation prompt."""
    batched: bool = False
    """Upstream's single batched engine call; here single-turn prompts take the same loop."""
    max_turns: int = 1
    """Model calls of one rollout at most."""
    max_input_length: int | None = None
    """Most tokens of a conversation that is sent to the engine; None means ``trainer.max_prompt_length``."""
    chat_template: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)
    """A chat template other than the tokenizer's."""
    chat_template_kwargs: dict[str, Any] | None = field(default_factory=dict)
    """Variables passed to the chat template."""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    """How tokens are drawn in training."""
    eval_sampling_params: SamplingParams | None = field(default_factory=default_eval_sampling_params)
    """How tokens are drawn in evaluation; null means greedy and as long as in training."""
    deterministic: bool = False
    """Queue a whole batch while the engine is paused and keep its order, so that equal runs give equal bits."""
    use_conversation_multi_turn: bool = True
    """One message per turn; False continues the same assistant message."""
    append_eos_token_after_stop_str_in_multi_turn: bool = True
    """End a turn that a stop string cut with the end-of-turn token."""
    zero_reward_on_non_stop: bool = False
    """Give reward 0 to a response that did not end by itself."""
    apply_overlong_filtering: bool = False
    """Keep a response that did not end by itself out of the loss."""
    use_cache_salt: bool = True
    """Separate the prefix caches of different weight versions."""
    step_wise_trajectories: bool = False
    """One training row per turn."""
    merge_stepwise_output: bool = False
    """Merge rows of consecutive turns that share a prefix; needs ``step_wise_trajectories``."""
    vision_language_generator: bool = False
    """Use the generator for images and text."""
    on_error: str = "mask"
    """A rollout that failed ``max_attempts`` times: ``mask`` keeps it out of loss and baselines, ``raise`` ends the
    run."""
    max_attempts: int = 2
    """Tries of one rollout, each with a fresh environment."""
    max_failed_fraction: float = 0.5
    """Share of failed rollouts in a batch above which the run ends."""
    continue_after_truncation: bool = False
    """Go on after a turn that the length limit cut."""
    rate_limit: RateLimitConfig = field(default_factory=RateLimitConfig)
    """Throttling of rollouts."""
    trajectory_timeout_s: float = 7200.0
    """Seconds for one rollout, generation included."""
    env_timeout_s: float = 600.0
    """Seconds for one call of an environment (``init``, ``step`` or ``close``)."""
