"""One model call through the inference client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyrl.errors import InferenceError
from skyrl.train.generators.sampling import wants_logprobs
from skyrl.types.rollout import classify_stop_reason

if TYPE_CHECKING:
    from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInput, InferenceEngineInterface


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine answered to one prompt."""

    ids: list[int]
    """Sampled tokens, at least one."""
    text: str
    """Their text."""
    logprobs: list[float] | None
    """Nats, one per token; None when not asked for."""
    stop_reason: str
    """`stop`, `length` or another word that does not mean failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What goes along with a prompt."""

    sampling_params: dict[str, Any]
    """Under the engine's names."""
    session_id: str
    """Routes all turns of a rollout to one server."""
    cache_salt: str | None = None
    """Separates prefix caches."""
    priority: int | None = None
    """Rank in the engine's queue, lowest first; None leaves it to arrival."""


class RolloutEngine:
    """Sends token ids, returns token ids.

    Args:
        client: The inference client.
        model: Name that the client should ask for; None means its own default.
    """

    def __init__(self, client: InferenceEngineInterface, model: str | None = None) -> None:
        self.client = client
        self.model = model

    async def complete(self, prompt_ids: list[int], options: CallOptions) -> Completion:
        """Sample one response.

        Raises:
            InferenceError: The engine aborted the call, or its answer has no tokens or lacks log-probs.
        """
        request: InferenceEngineInput = {
            "prompt_token_ids": [prompt_ids],
            "sampling_params": options.sampling_params,
            "session_ids": [options.session_id],
            "cache_salt": options.cache_salt,
        }
        if options.priority is not None:
            request["priorities"] = [options.priority]
        output = await self.client.generate(request, model=self.model)
        logprobs = output.get("response_logprobs")
        return _checked(
            Completion(
                ids=list(output["response_ids"][0]),
                text=output["responses"][0],
                logprobs=None if logprobs is None else list(logprobs[0]),
                stop_reason=output["stop_reasons"][0],
            ),
            options,
        )

    def weight_version(self) -> int | None:
        """Return how many weight syncs the engine has received; None when the client does not count them."""
        # A client of the user's own need not count: the interface does not ask for it.
        version = getattr(self.client, "weight_version", None)
        return version if isinstance(version, int) and not isinstance(version, bool) else None


def _checked(completion: Completion, options: CallOptions) -> Completion:
    session = options.session_id
    if classify_stop_reason(completion.stop_reason) == "failed":
        raise InferenceError(f"the engine ended the call of session {session} with {completion.stop_reason!r}")
    if not completion.ids:
        raise InferenceError(f"the engine returned no tokens for session {session}")
    if wants_logprobs(options.sampling_params):
        if completion.logprobs is None:
            raise InferenceError(f"the engine returned no log-probs for session {session}, though asked to")
        if len(completion.logprobs) != len(completion.ids):
            raise InferenceError(
                f"the engine returned {len(completion.ids)} tokens and {len(completion.logprobs)} log-probs "
                f"for session {session}"
            )
        return completion
    return Completion(ids=completion.ids, text=completion.text, logprobs=None, stop_reason=completion.stop_reason)
