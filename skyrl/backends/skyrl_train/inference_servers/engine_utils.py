"""From config to the engine's sampling parameters."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from skyrl.config.generator import SamplingParams
from skyrl.errors import ConfigError

VLLM_SAMPLING_FIELDS = frozenset(
    {
        "allowed_token_ids", "bad_words", "detokenize", "extra_args", "flat_logprobs", "frequency_penalty",
        "ignore_eos", "include_stop_str_in_output", "logit_bias", "logprob_token_ids", "logprobs", "max_tokens",
        "min_p", "min_tokens", "n", "output_kind", "presence_penalty", "prompt_logprobs", "repetition_detection",
        "repetition_penalty", "routed_experts_prompt_start", "seed", "skip_clone", "skip_reading_prefix_cache",
        "skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_token_ids", "structured_outputs",
        "temperature", "thinking_token_budget", "top_k", "top_p",
    }
)  # fmt: skip
"""Parameters that vLLM 0.26 knows. Its token endpoint ignores any other name silently, so we check."""

FINAL_ONLY = 2
"""``output_kind`` of a request that is answered once, at its end."""


def get_sampling_params_for_backend(backend: str, sampling_params: SamplingParams) -> dict[str, Any]:
    """The config's sampling parameters under the names of ``backend``.

    Raises:
        ValueError: The backend is not ``vllm``, or ``additional_kwargs`` names a parameter that it does not know.
    """
    if backend != "vllm":
        raise ConfigError(f"generator.inference_engine.backend={backend!r} is not supported; use vllm")
    return get_vllm_sampling_params(sampling_params)


def get_vllm_sampling_params(sampling_params: SamplingParams) -> dict[str, Any]:
    """Parameters of vLLM for one request; ``additional_kwargs`` add what is not set yet.

    Upstream always sends ``min_tokens=1``. That takes the end token out of the first position, so the sampler's
    log-probs there are those of another distribution than the trainer's; ours sends it only when it is asked for.
    """
    stop = [sampling_params.stop] if isinstance(sampling_params.stop, str) else sampling_params.stop
    params: dict[str, Any] = {
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
        "max_tokens": sampling_params.max_generate_length,
        "temperature": sampling_params.temperature,
        "top_p": sampling_params.top_p,
        "top_k": sampling_params.top_k,
        "min_p": sampling_params.min_p,
        "logprobs": sampling_params.logprobs,
        "stop": list(stop) if stop is not None else None,
    }
    if sampling_params.repetition_penalty != 1.0:
        params["repetition_penalty"] = sampling_params.repetition_penalty
    additional = dict(sampling_params.additional_kwargs or {})
    check_sampling_fields(additional, "generator.sampling_params.additional_kwargs")
    return additional | params


def check_sampling_fields(params: Mapping[str, Any], where: str = "sampling_params") -> None:
    """Raise ``ConfigError`` for a name that vLLM would ignore, and suggest near ones."""
    for name in params:
        if name not in VLLM_SAMPLING_FIELDS:
            near = difflib.get_close_matches(name, VLLM_SAMPLING_FIELDS, n=3) or sorted(VLLM_SAMPLING_FIELDS)
            raise ConfigError(f"{where}.{name} is no sampling parameter of vLLM; near names: {', '.join(near)}")
