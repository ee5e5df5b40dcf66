"""Rules of rollouts (`generator`) and of their environments."""

from __future__ import annotations

from skyrl.config.environment import EnvironmentConfig
from skyrl.config.generator import GeneratorConfig, SamplingParams
from skyrl.config.rules.choices import require_at_least, require_choice, require_positive, require_share
from skyrl.errors import ConfigError

_KEY = "generator"


def check_generator(generator: GeneratorConfig, *, max_prompt_length: int) -> None:
    """Check rollouts by themselves and against the length of prompts.

    Raises:
        ConfigError: a value is out of range or contradicts another.
    """
    for name in ("n_samples_per_prompt", "eval_n_samples_per_prompt", "max_turns", "max_attempts"):
        require_at_least(f"{_KEY}.{name}", getattr(generator, name), 1)
    for name in ("trajectory_timeout_s", "env_timeout_s"):
        require_positive(f"{_KEY}.{name}", getattr(generator, name))
    if generator.rate_limit.trajectories_per_second is not None:
        require_positive(f"{_KEY}.rate_limit.trajectories_per_second", generator.rate_limit.trajectories_per_second)
    require_at_least(f"{_KEY}.rate_limit.max_concurrency", generator.rate_limit.max_concurrency, 1, unless=[None])
    require_choice(f"{_KEY}.on_error", generator.on_error, ("mask", "raise"))
    require_choice(f"{_KEY}.chat_template.source", generator.chat_template.source, ("name", "file"))
    require_share(f"{_KEY}.max_failed_fraction", generator.max_failed_fraction)
    _check_input_length(generator, max_prompt_length)
    _check_loops(generator)
    check_sampling(f"{_KEY}.sampling_params", generator.sampling_params)
    if generator.eval_sampling_params is not None:
        check_sampling(f"{_KEY}.eval_sampling_params", generator.eval_sampling_params)


def check_sampling(key: str, params: SamplingParams) -> None:
    """Check how tokens are drawn; ``key`` names the group in errors.

    Raises:
        ConfigError: a value is out of range.
    """
    require_at_least(f"{key}.max_generate_length", params.max_generate_length, 1)
    require_at_least(f"{key}.temperature", params.temperature, 0)
    require_positive(f"{key}.repetition_penalty", params.repetition_penalty)
    require_positive(f"{key}.top_p", params.top_p)
    require_share(f"{key}.top_p", params.top_p)
    require_share(f"{key}.min_p", params.min_p)
    require_at_least(f"{key}.top_k", params.top_k, 1, unless=[-1, 0])
    if params.logprobs not in {None, 0, 1}:
        raise ConfigError(
            f"{key}.logprobs={params.logprobs}: must be null, 0 or 1; training uses the chosen token's log-prob only"
        )


def _check_input_length(generator: GeneratorConfig, max_prompt_length: int) -> None:
    require_positive("trainer.max_prompt_length", max_prompt_length)
    length = generator.max_input_length
    if length is None:
        return
    prompt = f"trainer.max_prompt_length={max_prompt_length}"
    if generator.max_turns == 1 and length != max_prompt_length:
        raise ConfigError(f"{_KEY}.max_input_length={length}: must equal {prompt} when {_KEY}.max_turns=1")
    if length < max_prompt_length:
        raise ConfigError(f"{_KEY}.max_input_length={length}: must be at least {prompt}")


def _check_loops(generator: GeneratorConfig) -> None:
    has_template = generator.chat_template.name_or_path is not None
    if generator.batched:
        if generator.max_turns > 1:
            raise ConfigError(
                f"{_KEY}.batched=true is for single turns; set {_KEY}.max_turns=1 or {_KEY}.batched=false"
            )
        if generator.chat_template_kwargs:
            raise ConfigError(f"{_KEY}.batched=true needs an empty {_KEY}.chat_template_kwargs")
    if generator.merge_stepwise_output and not generator.step_wise_trajectories:
        raise ConfigError(f"{_KEY}.merge_stepwise_output=true needs {_KEY}.step_wise_trajectories=true")
    if generator.step_wise_trajectories:
        _refuse_with("step_wise_trajectories", {"batched=true": generator.batched, "chat_template": has_template})
    if generator.vision_language_generator:
        step_wise = generator.step_wise_trajectories
        _refuse_with(
            "vision_language_generator", {"batched=true": generator.batched, "step_wise_trajectories=true": step_wise}
        )
    needs_messages = generator.step_wise_trajectories or generator.vision_language_generator
    if needs_messages and not generator.use_conversation_multi_turn:
        raise ConfigError(
            f"{_KEY}.step_wise_trajectories and {_KEY}.vision_language_generator need "
            f"{_KEY}.use_conversation_multi_turn=true"
        )


def _refuse_with(feature: str, others: dict[str, bool]) -> None:
    for other, is_on in others.items():
        if is_on:
            raise ConfigError(f"{_KEY}.{feature}=true does not work with {_KEY}.{other}")


def check_environment(environment: EnvironmentConfig) -> None:
    """Check the settings of environments.

    Raises:
        ConfigError: a value is out of range.
    """
    require_at_least("environment.skyrl_gym.max_env_workers", environment.skyrl_gym.max_env_workers, 0)
    require_positive("environment.skyrl_gym.search.timeout", environment.skyrl_gym.search.timeout)
