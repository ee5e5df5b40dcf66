"""The one handle on inference servers: picklable, usable from any event loop.

```
generate, chat, completion, render ── data plane ──▶ proxy_url (router or the only server) ──▶ servers
pause, weights, cache, RPC ────────── control plane ─────────────────────────────────────────▶ every server_url
```
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl import env_vars
from skyrl.backends.skyrl_train.inference_servers.base import (
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    PauseMode,
)
from skyrl.backends.skyrl_train.inference_servers.control_plane import ControlPlane
from skyrl.backends.skyrl_train.inference_servers.data_plane import SESSION_HEADER, DataPlane
from skyrl.backends.skyrl_train.inference_servers.generation import (
    Generation,
    GenerationRequest,
    wire_sampling_params,
)
from skyrl.backends.skyrl_train.inference_servers.health import ServerHealth
from skyrl.backends.skyrl_train.inference_servers.transport import (
    HttpTransport,
    RetryPolicy,
    ServerResponseError,
    raise_for_status,
)
from skyrl.errors import DeadlineError, InferenceError

__all__ = ["PauseMode", "RemoteInferenceClient", "ServerResponseError", "raise_for_status"]

logger = logging.getLogger(__name__)

FINISH_SESSION_TIMEOUT_S = 10.0
NO_ROUTE_STATUSES = frozenset({404, 405})


@dataclass
class RemoteInferenceClient(InferenceEngineInterface):
    """Talks HTTP to vLLM servers; create it with ``setup.build_new_inference_client``.

    Pickling drops connections and the link to the supervisor; everything else travels, also the weight version.
    """

    proxy_url: str
    """Where generation goes: the router, or the only server."""
    server_urls: list[str]
    """Every server, engine-major, data-parallel rank minor."""
    data_parallel_size: int
    """Servers that form one engine."""
    model_name: str = "default"
    """Base model name or ``served_model_name``; never an adapter."""
    tokenizer: Any = None
    """Hugging Face tokenizer; when set, text is made here and not over HTTP."""
    access_token: str | None = None
    """Bearer token of this run's servers."""
    control_timeout_s: float = 1800.0
    """Deadline of one control call to one server (``generator.inference_engine.control_timeout_s``)."""
    trajectory_timeout_s: float = 7200.0
    """Deadline of one call of the data plane (``generator.trajectory_timeout_s``)."""
    retry_on_abort: bool = True
    """Go on by itself when the engine aborts a request (abort pause, sleep); False returns the partial response."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """How failed sends of the data plane are repeated."""
    health: ServerHealth | None = field(default=None, repr=False, compare=False)
    """Deaths of servers that this run started; None in a pickled copy."""
    _weight_version: int = field(default=0, repr=False)
    _world_size: int | None = field(default=None, repr=False)
    _has_sessions: bool = field(default=True, repr=False)
    _transport: HttpTransport | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.data_parallel_size <= 0:
            raise ValueError(f"data_parallel_size={self.data_parallel_size} must be at least 1")
        if not self.server_urls or len(self.server_urls) % self.data_parallel_size:
            raise ValueError(
                f"{len(self.server_urls)} server_urls must be a positive multiple of "
                f"data_parallel_size={self.data_parallel_size}"
            )
        self.proxy_url = self.proxy_url.rstrip("/")
        self.server_urls = [url.rstrip("/") for url in self.server_urls]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_transport": None, "health": None}

    async def __aenter__(self) -> RemoteInferenceClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    # Data plane

    async def generate(self, input_batch: InferenceEngineInput, model: str | None = None) -> InferenceEngineOutput:
        """Sample one response per prompt, all at once; answers keep the order of the prompts.

        A request that fails does not take the others along: its row has stop reason ``error``, no tokens, and its
        message in ``errors``. The call raises when every request failed, and at once when a server of this run died.

        Args:
            input_batch: Tokens and parameters.
            model: Name that the engine serves; None takes ``model_name``.

        Raises:
            ValueError: Text prompts, lists of other lengths, ``n`` above 1, or an unknown sampling parameter.
            EngineDiedError: A server of this run died.
            InferenceError, DeadlineError: Every request failed.
        """
        requests = self._generation_requests(input_batch, self._resolve_model(model))
        data_plane = self._data()
        results = await asyncio.gather(*(data_plane.generate_or_fail(request) for request in requests))
        _raise_if_all_failed([error for _, error in results])
        return await self._output([generation for generation, _ in results], requests)

    def get_endpoint_url(self) -> str:
        """Base URL of the data plane."""
        return self.proxy_url

    async def chat_completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        """``POST /v1/chat/completions``. ``session_id`` in the body becomes the session header."""
        return await self._chat("/v1/chat/completions", request_payload)

    async def completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        """``POST /v1/completions``."""
        return await self._chat("/v1/completions", request_payload)

    async def render_chat_completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        """``POST /v1/chat/completions/render``: chat template and tokens, no generation."""
        return await self._chat("/v1/chat/completions/render", request_payload)

    async def tokenize(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, by the local tokenizer where there is one."""
        if self.tokenizer is not None:
            encoded = await asyncio.to_thread(self.tokenizer, texts, add_special_tokens=add_special_tokens)
            return [list(ids) for ids in encoded["input_ids"]]
        bodies = [
            {"model": self.model_name, "prompt": text, "add_special_tokens": add_special_tokens} for text in texts
        ]
        return [answer["tokens"] for answer in await self._data().post_each("/tokenize", bodies)]

    async def detokenize(self, token_ids: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        """Text of each list of ids, by the local tokenizer (in a thread) where there is one."""
        if self.tokenizer is not None:
            return await asyncio.to_thread(
                self.tokenizer.batch_decode, token_ids, skip_special_tokens=skip_special_tokens
            )
        bodies = [{"model": self.model_name, "tokens": ids} for ids in token_ids]
        return [answer["prompt"] for answer in await self._data().post_each("/detokenize", bodies)]

    async def finish_session(self, session_id: Hashable) -> None:
        """Free the router's place of a session. Never raises; does nothing without a session or without a router."""
        if session_id is None or session_id == "" or not self._has_sessions:
            return
        try:
            await self._http().request_within(
                FINISH_SESSION_TIMEOUT_S,
                "finish_session",
                "POST",
                f"{self.proxy_url}/finish_session",
                params={"session_id": session_id},
                json={},
                retry=RetryPolicy(attempts=1),
            )
        except ServerResponseError as error:
            if error.status in NO_ROUTE_STATUSES:
                self._has_sessions = False  # a server answered: there is no router that counts sessions
            else:
                logger.warning("finish_session(%s) failed: %s", session_id, error)
        except (InferenceError, TimeoutError) as error:
            logger.warning("finish_session(%s) failed: %s", session_id, error)

    # Control plane

    async def pause(self, mode: PauseMode | str = PauseMode.KEEP, clear_cache: bool = False) -> dict[str, Any]:
        """Pause every server; see ``PauseMode``. New requests queue. When one server fails, the others resume."""
        chosen = mode if isinstance(mode, PauseMode) else PauseMode(mode.lower())
        return await self._control().pause(chosen, clear_cache)

    async def resume(self) -> dict[str, Any]:
        """Let every server schedule again."""
        return await self._control().call("/resume")

    async def pause_generation(self, clear_cache: bool = False) -> dict[str, Any]:
        """``pause`` in keep mode."""
        return await self.pause(PauseMode.KEEP, clear_cache)

    async def resume_generation(self) -> dict[str, Any]:
        """``resume``."""
        return await self.resume()

    async def is_paused(self) -> dict[str, bool]:
        """Whether each server is paused."""
        answers = await self._control().call("/is_paused", method="GET")
        return {url: bool(answer["body"]["is_paused"]) for url, answer in answers.items()}

    async def wait_until_queued(self, count: int, timeout_s: float) -> int:
        """Wait until the servers together hold ``count`` unfinished requests; for a batch sent during a pause.

        With priorities given, resuming then starts the batch in an order that does not depend on arrival.

        Raises:
            DeadlineError: Fewer came in time.
        """
        return await self._control().wait_until_queued(count, timeout_s)

    async def sleep(self, level: int = 2, tags: list[str] | None = None) -> dict[str, Any]:
        """Give up GPU memory: level 1 keeps weights in host memory, level 2 drops them. Not for CPU engines."""
        params: dict[str, Any] = {"level": level}
        if tags:
            params["tags"] = tags
        return await self._control().call("/sleep", params=params)

    async def wake_up(self, tags: list[str] | None = None) -> dict[str, Any]:
        """Bring memory back: ``weights``, ``kv_cache``, or all."""
        return await self._control().call("/wake_up", params={"tags": tags} if tags else None)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> dict[str, Any]:
        """Forget cached prefixes; with ``reset_running_requests`` also those of frozen requests, which recompute."""
        return await self._control().reset_prefix_cache(reset_running_requests)

    async def init_weight_update_communicator(self, init_info: Any) -> dict[str, Any]:
        """``POST /init_weight_transfer_engine`` with each server's part of ``init_info`` (a ``WeightSyncInitInfo``)."""
        _, per_server = await self.get_world_size()
        infos = init_info.for_servers(per_server, len(self.server_urls), self.data_parallel_size)
        bodies = {url: {"init_info": info.to_api_payload()} for url, info in zip(self.server_urls, infos, strict=True)}
        return await self._control().call("/init_weight_transfer_engine", json_by_url=bodies)

    async def start_weight_update(self) -> dict[str, Any]:
        """Begin to replace weights.

        Raises:
            WeightSyncError: A server still generates; an engine dies when it generates during an update.
        """
        control = self._control()
        await control.require_paused()
        return await control.call("/start_weight_update")

    async def update_named_weights(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Have every engine receive one bucket; ``request`` is the receiver's ``update_info``."""
        return await self._control().call("/update_weights", json={"update_info": dict(request)})

    async def finish_weight_update(self) -> dict[str, Any]:
        """End what ``start_weight_update`` began."""
        return await self._control().call("/finish_weight_update")

    async def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, list[Any]]:
        """Call a method of every engine worker (worker extension); ``{url: [result of each worker]}``."""
        return await self._control().collective_rpc(method, args, kwargs, timeout_s)

    async def get_world_size(self) -> tuple[int, int]:
        """Engine workers in total, and as each server reports them; asked once, then remembered.

        vLLM reports tensor x pipeline x data parallel on each of an engine's data-parallel servers.
        """
        if self._world_size is None:
            self._world_size = await self._control().world_size_per_server()
        return self._world_size * (len(self.server_urls) // self.data_parallel_size), self._world_size

    @property
    def weight_version(self) -> int:
        """Weight syncs that this client counted; 0 before the first."""
        return self._weight_version

    def increment_weight_version(self) -> int:
        """Count one more sync; the new version."""
        self._weight_version += 1
        return self._weight_version

    async def teardown(self) -> None:
        """``aclose``."""
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        if self._transport is not None:
            await self._transport.close()

    # Inside

    def _http(self) -> HttpTransport:
        if self._transport is None:
            self._transport = HttpTransport(
                max_in_flight=env_vars.SKYRL_GENERATE_CONCURRENCY_PER_ENGINE * len(self.server_urls),
                access_token=self.access_token,
                health=self.health,
                retry=self.retry,
            )
        return self._transport

    def _data(self) -> DataPlane:
        return DataPlane(
            self._http(),
            self.proxy_url,
            self._control(),
            self.retry,
            self.retry_on_abort,
            timeout_s=self.trajectory_timeout_s,
        )

    def _control(self) -> ControlPlane:
        return ControlPlane(self._http(), self.server_urls, self.control_timeout_s)

    def _resolve_model(self, model: str | None) -> str:
        return model or self.model_name

    async def _chat(self, path: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        body = dict(payload.get("json") or {})
        headers = dict(payload.get("headers") or {})
        session_id = body.pop("session_id", None)
        if session_id:
            headers[SESSION_HEADER] = str(session_id)
        body["model"] = self._resolve_model(body.get("model"))
        return await self._data().post(path, body, headers)

    def _generation_requests(self, batch: InferenceEngineInput, model: str) -> list[GenerationRequest]:
        if batch.get("prompts") is not None:
            raise ValueError("the HTTP client takes prompt_token_ids only; apply the chat template first")
        prompts = batch.get("prompt_token_ids")
        if prompts is None:
            raise ValueError("prompt_token_ids is missing")
        count = len(prompts)
        params = batch.get("sampling_params")
        if isinstance(params, list):
            wired = [wire_sampling_params(one) for one in _per_prompt("sampling_params", params, count)]
        else:
            wired = [wire_sampling_params(params)] * count
        sessions = list(batch.get("session_ids") or [])
        sessions += [None] * (count - len(sessions))
        features = _per_prompt("mm_features", batch.get("mm_features"), count)
        priorities = _per_prompt("priorities", batch.get("priorities"), count)
        return [
            GenerationRequest(
                token_ids=list(prompts[i]),
                sampling_params=wired[i],
                model=model,
                session_id=str(sessions[i]) if sessions[i] else None,
                cache_salt=batch.get("cache_salt"),
                features=features[i],
                priority=priorities[i],
            )
            for i in range(count)
        ]

    async def _output(
        self, generations: Sequence[Generation], requests: Sequence[GenerationRequest]
    ) -> InferenceEngineOutput:
        ids = [generation.token_ids for generation in generations]
        skip = all(request.sampling_params.get("skip_special_tokens", True) for request in requests)
        output: InferenceEngineOutput = {
            "responses": await self.detokenize(ids, skip_special_tokens=skip),
            "response_ids": ids,
            "stop_reasons": [generation.stop_reason for generation in generations],
            "response_logprobs": None,
        }
        if any("logprobs" in request.sampling_params for request in requests):
            output["response_logprobs"] = [generation.logprobs or [] for generation in generations]
        if any(generation.prompt_logprobs is not None for generation in generations):
            output["prompt_logprobs"] = [generation.prompt_logprobs for generation in generations]
        if any(generation.error for generation in generations):
            output["errors"] = [generation.error for generation in generations]
        if clamped := sum(generation.num_clamped for generation in generations):
            logger.warning("%d sampled token(s) came without a finite log-prob", clamped)
            output["num_clamped_logprobs"] = [generation.num_clamped for generation in generations]
        return output


def _raise_if_all_failed(errors: Sequence[InferenceError | DeadlineError | None]) -> None:
    """``errors`` has one entry per prompt."""
    first = errors[0] if errors else None
    if first is None or None in errors:
        return
    if len(errors) == 1:
        raise first
    raise InferenceError(f"all {len(errors)} generation requests failed, the first with: {first}") from first


def _per_prompt(name: str, values: Sequence[Any] | None, count: int) -> Sequence[Any]:
    if values is None:
        return [None] * count
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts")
    return values
