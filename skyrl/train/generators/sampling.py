"""Sampling parameters of a batch: checked once, then one dict per model call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.train.generators.base import SamplingParamsInput
from skyrl.utils.seeds import request_seed


def normalize_sampling_params(params: SamplingParamsInput, num_prompts: int) -> list[dict[str, Any]]:
    """Return one checked dict per prompt, under the engine's names.

    Args:
        params: One dict for all prompts, or one per prompt.
        num_prompts: Rows of the batch.

    Raises:
        ValueError: The list has another length, a dict asks for several samples or for more than the chosen
            token's log-prob, or only some of the rows ask for log-probs.
    """
    rows = [params] * num_prompts if isinstance(params, Mapping) else list(params)
    if len(rows) != num_prompts:
        raise ValueError(f"sampling_params: {len(rows)} dicts for {num_prompts} prompts; give one, or one per prompt")
    checked = [_checked(dict(row)) for row in rows]
    if len({wants_logprobs(row) for row in checked}) > 1:
        raise ValueError("sampling_params: some prompts ask for logprobs and some do not; a batch must agree")
    return checked


def wants_logprobs(params: Mapping[str, Any]) -> bool:
    """Say whether the engine is asked for the log-probs of the sampled tokens (0 and 1 both ask)."""
    return params.get("logprobs") is not None


def stop_strings(params: Mapping[str, Any]) -> Sequence[str]:
    """Return the stop strings, possibly none."""
    return params.get("stop") or ()


def call_params(
    params: Mapping[str, Any], *, prompt_len: int, max_model_len: int | None, seed: int | None
) -> dict[str, Any]:
    """Return the parameters of one model call.

    Args:
        params: Checked parameters of the row.
        prompt_len: Tokens of this call's prompt.
        max_model_len: Context of the engine in tokens, if known; the answer is kept inside it.
        seed: Sampling seed of the call; dropped for greedy calls and where the caller set one.
    """
    call = dict(params)
    if max_model_len is not None:
        room = max_model_len - prompt_len
        call["max_tokens"] = min(call.get("max_tokens") or room, room)
    greedy = call.get("temperature") == 0
    if seed is not None and not greedy and call.get("seed") is None:
        call["seed"] = seed
    return call


def turn_seed(run_seed: int | None, uid: str, repetition: int, turn: int, global_step: int | None) -> int | None:
    """Return the seed of a model call, or None when the run has none."""
    return None if run_seed is None else request_seed(run_seed, uid, repetition, turn, global_step)


def _checked(params: dict[str, Any]) -> dict[str, Any]:
    if isinstance(params.get("stop"), str):
        params["stop"] = [params["stop"]]
    if params.get("logprobs") not in (None, 0, 1):
        raise ValueError(f"sampling_params.logprobs={params['logprobs']} must be null, 0 or 1 (the chosen token's)")
    if params.get("n") not in (None, 1):
        raise ValueError(f"sampling_params.n={params['n']} must be 1; use generator.n_samples_per_prompt for groups")
    return params
