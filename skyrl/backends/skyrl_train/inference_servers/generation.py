"""One request to vLLM's token endpoint: its body, its answer, and how an aborted one goes on.

Pure functions; ``remote_inference_client`` sends what they make.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyrl.backends.skyrl_train.inference_servers.base import MultiModalFeatures
from skyrl.backends.skyrl_train.inference_servers.engine_utils import FINAL_ONLY, check_sampling_fields
from skyrl.errors import InferenceError

GENERATE_PATH = "/inference/v1/generate"
ENGINE_REQUEST_PREFIX = "generate-tokens-"
"""vLLM's own id of such a request is this plus the ``X-Request-Id`` header."""

NO_LOGPROB = -9999.0
"""Stands for a log-prob that the engine did not give, or gave as NaN or infinite: no information."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt on its way to the engine."""

    token_ids: list[int]
    sampling_params: dict[str, Any]
    """As checked by ``wire_sampling_params``."""
    model: str
    session_id: str | None = None
    cache_salt: str | None = None
    features: MultiModalFeatures | None = None
    priority: int | None = None

    def body(self) -> dict[str, Any]:
        """JSON body of ``POST /inference/v1/generate``."""
        body: dict[str, Any] = {
            "sampling_params": self.sampling_params,
            "model": self.model,
            "token_ids": self.token_ids,
        }
        optional = {"features": self.features, "cache_salt": self.cache_salt, "priority": self.priority}
        return body | {name: value for name, value in optional.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One response."""

    token_ids: list[int]
    stop_reason: str
    logprobs: list[float] | None
    """In nats, one per token; None when not asked for."""
    prompt_logprobs: list[float | None] | None = None
    num_clamped: int = 0
    """Tokens whose log-prob is ``NO_LOGPROB``."""
    error: str | None = None
    """Why the request failed; the rest is then empty."""


def wire_sampling_params(params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check sampling parameters and complete them for the wire.

    Only the chosen token's log-prob is read, so ``logprobs`` asks vLLM for no others (0).

    Raises:
        ValueError: ``n`` above 1, or a name that vLLM would ignore.
    """
    given = dict(params or {})
    if (given.get("n") or 1) > 1:
        raise ValueError(f"sampling_params.n={given['n']}: generate returns one response per prompt; repeat the prompt")
    check_sampling_fields(given)
    wire = {name: value for name, value in given.items() if value is not None}
    if "logprobs" in wire:
        wire["logprobs"] = 0
    wire["output_kind"] = FINAL_ONLY
    return wire


def parse_generation(body: Any, request: GenerationRequest) -> Generation:
    """The response in the engine's answer to ``request``.

    Raises:
        InferenceError: The answer has no choice.
    """
    choices = body.get("choices") if isinstance(body, dict) else None
    if not choices:
        raise InferenceError(f"the engine answered without a choice: {str(body)[:200]}")
    choice = choices[0]
    token_ids = choice.get("token_ids") or []
    logprobs, clamped = None, 0
    if "logprobs" in request.sampling_params:
        content = (choice.get("logprobs") or {}).get("content") or []
        logprobs, clamped = _finite_logprobs([entry.get("logprob") for entry in content], len(token_ids))
    return Generation(
        token_ids=token_ids,
        stop_reason=choice.get("finish_reason") or "stop",
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(body.get("prompt_logprobs"), request.token_ids),
        num_clamped=clamped,
    )


def _finite_logprobs(values: Sequence[float | None], length: int) -> tuple[list[float], int]:
    clean = [
        float(value) if value is not None and math.isfinite(value) and value > NO_LOGPROB else NO_LOGPROB
        for value in values[:length]
    ]
    clean += [NO_LOGPROB] * (length - len(clean))
    return clean, clean.count(NO_LOGPROB)


def _prompt_logprobs(entries: Any, token_ids: Sequence[int]) -> list[float | None] | None:
    if not entries:
        return None
    return [
        entry[str(token)]["logprob"] if entry and str(token) in entry else None
        for token, entry in zip(token_ids, entries, strict=False)
    ]


def continue_after_abort(request: GenerationRequest, partial: Generation, resumes: int) -> GenerationRequest | None:
    """The request that goes on where an aborted one stopped; None when the partial response is already long enough.

    ``partial`` is what ``request`` (not an earlier one) produced. A seed moves by ``resumes``, or the continuation
    would draw the numbers of the first part again.
    """
    params = dict(request.sampling_params)
    done = len(partial.token_ids)
    if params.get("max_tokens") is not None:
        params["max_tokens"] -= done
        if params["max_tokens"] <= 0:
            return None
    if params.get("min_tokens"):
        params["min_tokens"] = max(0, params["min_tokens"] - done)
    if params.get("seed") is not None and done:
        params["seed"] = (params["seed"] + resumes) % 2**31
    return replace(request, token_ids=[*request.token_ids, *partial.token_ids], sampling_params=params)


def join(first: Generation, second: Generation) -> Generation:
    """One response out of an aborted one and its continuation."""
    logprobs = None
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = first.logprobs + second.logprobs
    return Generation(
        token_ids=first.token_ids + second.token_ids,
        stop_reason=second.stop_reason,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs,
        num_clamped=first.num_clamped + second.num_clamped,
    )


def failed(error: Exception, *, with_logprobs: bool) -> Generation:
    """The empty response that stands for a request that failed."""
    text = f"{type(error).__name__}: {error}"
    return Generation(token_ids=[], stop_reason="error", logprobs=[] if with_logprobs else None, error=text)
