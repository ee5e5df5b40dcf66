"""The boundary between everybody who needs tokens and the inference servers.

Generators and the trainer hold an ``InferenceEngineInterface``; its product implementation is
``remote_inference_client.RemoteInferenceClient``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from enum import StrEnum
from typing import Any, NotRequired

from typing_extensions import TypedDict

from skyrl.types.rollout import ConversationType

__all__ = [
    "ConversationType",
    "InferenceEngineInput",
    "InferenceEngineInterface",
    "InferenceEngineOutput",
    "MultiModalFeatures",
    "PauseMode",
]


class PauseMode(StrEnum):
    """What a pause does with requests that run."""

    ABORT = "abort"
    """End them now; each answers with its partial tokens."""
    WAIT = "wait"
    """Let them end first."""
    KEEP = "keep"
    """Freeze them; ``resume`` goes on exactly where they stopped."""


class MultiModalFeatures(TypedDict):
    """Images of one prompt, as vLLM's render endpoint returns them."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[dict[str, int]]]
    kwargs_data: NotRequired[dict[str, list[str | None]] | None]


class InferenceEngineInput(TypedDict):
    """A batch of prompts; every list has one entry per prompt."""

    prompts: NotRequired[list[ConversationType] | None]
    """Conversations; the HTTP client takes tokens only and refuses them."""
    prompt_token_ids: NotRequired[list[list[int]] | None]
    sampling_params: NotRequired[dict[str, Any] | list[dict[str, Any]] | None]
    """vLLM's names; one dict for the batch or one per prompt."""
    session_ids: NotRequired[list[Hashable] | None]
    """Requests of one session reach one server. A shorter list leaves the rest without a session."""
    mm_features: NotRequired[list[MultiModalFeatures | None] | None]
    cache_salt: NotRequired[str | None]
    """Prompts share cached prefixes only with requests of the same salt."""
    priorities: NotRequired[list[int] | None]
    """Lower is scheduled first; needs an engine with priority scheduling (``generator.deterministic``)."""


class InferenceEngineOutput(TypedDict):
    """Responses in the order of the prompts."""

    responses: list[str]
    """Decoded text, for people and environments; the tokens are authoritative."""
    response_ids: list[list[int]]
    stop_reasons: list[str]
    """``stop``, ``length``, ``abort``, or ``error`` for a prompt whose request failed."""
    response_logprobs: list[list[float]] | None
    """Log-prob of each sampled token, in nats; None when the sampling parameters ask for none."""
    prompt_logprobs: NotRequired[list[list[float | None] | None]]
    """Log-prob of each prompt token (None for the first), when asked for."""
    errors: NotRequired[list[str | None]]
    """Present when a request failed: what went wrong, per prompt."""
    num_clamped_logprobs: NotRequired[list[int]]
    """Present when the engine gave no finite log-prob for a token: how many such tokens, per prompt."""


class InferenceEngineInterface(ABC):
    """What generators, trainer and weight sync need of an engine."""

    @property
    @abstractmethod
    def model_name(self) -> str:
        """Name under which the engine serves the policy."""

    @abstractmethod
    async def generate(self, input_batch: InferenceEngineInput, model: str | None = None) -> InferenceEngineOutput:
        """Sample one response per prompt."""

    @abstractmethod
    def get_endpoint_url(self) -> str:
        """Base URL of the data plane; the OpenAI API lives under ``/v1``."""

    @abstractmethod
    async def chat_completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        """OpenAI chat completion; the payload is ``{"json": body, "headers": {...}}``."""

    @abstractmethod
    async def render_chat_completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        """Tokenise a chat without generating."""

    @abstractmethod
    async def completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        """OpenAI text completion."""

    @abstractmethod
    async def wake_up(self, tags: list[str] | None = None) -> Any:
        """Bring memory back that ``sleep`` gave up."""

    @abstractmethod
    async def sleep(self, level: int = 2, tags: list[str] | None = None) -> Any:
        """Give up GPU memory."""

    @abstractmethod
    async def init_weight_update_communicator(self, init_info: Any) -> Any:
        """Prepare every engine for weight transfers."""

    @abstractmethod
    async def update_named_weights(self, request: Any) -> Any:
        """Have every engine receive one bucket of weights."""

    @abstractmethod
    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> Any:
        """Forget cached keys and values."""

    @abstractmethod
    async def pause_generation(self, clear_cache: bool = False) -> Any:
        """Freeze generation."""

    @abstractmethod
    async def resume_generation(self) -> Any:
        """Undo ``pause_generation``."""

    @abstractmethod
    async def finish_session(self, session_id: Hashable) -> None:
        """Say that no further request of this session comes."""

    @abstractmethod
    async def get_world_size(self) -> tuple[int, int]:
        """Engine workers in total, and per server."""

    @abstractmethod
    async def teardown(self) -> None:
        """Close connections."""
