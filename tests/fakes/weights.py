"""Both ends of a weight sync in one process: a trainer of one rank, and an engine that only keeps what it receives."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from skyrl.backends.skyrl_train.weight_sync.base import WeightChunk, WeightMetadata
from skyrl.backends.skyrl_train.weight_sync.fingerprint import hash_values, local_columns
from skyrl.backends.skyrl_train.weight_sync.group import TorchTransferGroup, build_gloo_group, join_store
from skyrl.backends.skyrl_train.weight_sync.packing import BucketLayout, bucket_views, require_checksum
from skyrl.backends.skyrl_train.weight_sync.worker_mixin import WeightSyncWorkerMixin
from skyrl.config.inference_engine import InferenceEngineConfig
from skyrl.types.weights import FingerprintPlan


class DictExtractor:
    """Weights in a dict. ``sent`` replaces what goes on the wire, to plant a fault that only a proof can see."""

    def __init__(self, weights: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor] | None = None) -> None:
        self.weights, self.sent = dict(weights), dict(weights if sent is None else sent)

    def get_weight_metadata(self, dtype: torch.dtype) -> WeightMetadata:
        wire = str(dtype).removeprefix("torch.")
        return WeightMetadata(
            names=list(self.weights),
            dtype_names=[wire] * len(self.weights),
            shapes=[list(tensor.shape) for tensor in self.weights.values()],
        )

    def extract_weights(self, dtype: torch.dtype) -> Iterator[WeightChunk]:
        for name, tensor in self.sent.items():
            yield WeightChunk([name], [str(dtype)], [list(tensor.shape)], [tensor])

    def extract_named(self, names: Sequence[str], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, self.weights[name].to(dtype)


class SoloTrainer(WeightSyncWorkerMixin):
    """A trainer of one process, and at once the group of ranks that a session sees."""

    rank, world_size, is_colocated = 0, 1, False

    def __init__(self, extractor: Any) -> None:
        self.weight_extractor = extractor

    async def init(self, client: Any, ie_cfg: InferenceEngineConfig) -> WeightMetadata:
        return await self.init_weight_sync_state(client, ie_cfg)

    async def send(self, client: Any, ie_cfg: InferenceEngineConfig) -> dict[str, float]:
        return await self.broadcast_to_inference_engines(client, ie_cfg)

    async def fingerprint(self, plan: FingerprintPlan) -> dict[str, str]:
        return self.weight_fingerprint(plan)


class FakeEngine:
    """One engine worker behind a client of its own: receives buckets over real gloo and keeps the tensors."""

    def __init__(self) -> None:
        self.server_urls = ["http://127.0.0.1:1"]
        self.calls: list[str] = []
        self.held: dict[str, torch.Tensor] = {}
        self.incoming: dict[str, torch.Tensor] = {}
        self.fail_on: dict[str, list[Exception]] = {}
        self.paused = False
        self.version = 0
        self.weight_version = 0
        self._updating = False
        self._group: TorchTransferGroup | None = None
        self._lock = threading.Lock()

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self.fail_on.get(call):
            raise self.fail_on[call].pop(0)

    async def get_world_size(self) -> tuple[int, int]:
        return 1, 1

    async def init_weight_update_communicator(self, init_info: Any) -> None:
        self._note("init")
        info = init_info.for_servers(1, 1, 1)[0].to_api_payload()
        await asyncio.to_thread(self._join, info)

    def _join(self, info: dict[str, Any]) -> None:
        store = join_store(
            info["master_address"], info["master_port"], info["rank_offset"], info["world_size"], info["timeout_s"]
        )
        self._group = build_gloo_group(
            store, info["rank_offset"], info["world_size"], address="127.0.0.1", timeout_s=info["timeout_s"]
        )

    async def start_weight_update(self) -> None:
        assert self.paused, "weights may only change while generation is paused"
        assert not self._updating, "already active"
        self._note("start")
        self._updating, self.incoming = True, {}

    async def update_named_weights(self, update_info: dict[str, Any]) -> None:
        await asyncio.to_thread(self._receive, update_info)

    def _receive(self, info: dict[str, Any]) -> None:
        with self._lock:
            assert self._updating, "update without start"
            assert self._group is not None
            try:
                buffer = torch.empty(sum(info["num_bytes"]), dtype=torch.uint8)
                self._group.broadcast(buffer).wait()
                self._note("update")
                layout = BucketLayout(**{name: value for name, value in info.items() if name != "checksum"})
                require_checksum(buffer, info["checksum"], layout)
                self.incoming |= {name: tensor.clone() for name, tensor in bucket_views(buffer, layout)}
            except BaseException:
                self._updating = False
                raise

    async def finish_weight_update(self) -> None:
        assert self._updating, "finish without start"
        self._note("finish")
        self._updating, self.held = False, self.incoming

    async def pause_generation(self, clear_cache: bool = False) -> None:
        self._note("pause")
        self.paused = True

    async def resume_generation(self) -> None:
        self._note("resume")
        self.paused = False

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        assert reset_running_requests
        self._note("reset")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self._note(f"wake {tags}")

    def increment_weight_version(self) -> int:
        self.weight_version += 1
        return self.weight_version

    async def collective_rpc(
        self, method: str, args: Any = None, kwargs: Any = None, timeout_s: float | None = None
    ) -> dict[str, list[Any]]:
        name = method.removeprefix("skyrl_")
        self._note(name)
        return {self.server_urls[0]: [getattr(self, f"_{name}")(**(kwargs or {}))]}

    def _weight_shards(self, shapes: dict[str, list[int]]) -> dict[str, list[None]]:
        return {name: [None] for name in shapes}

    def _read_back(self, plan: dict[str, Any]) -> list[dict[str, Any]]:
        records = []
        for sample in FingerprintPlan.from_json_dict(plan):
            if sample.name in self.held:
                values = self.held[sample.name].index_select(-1, torch.tensor(local_columns(sample, None)))
                records.append({"name": sample.name, "shard": None, "via": "parameter", "hash": hash_values(values)})
        return records

    def _get_weight_version(self) -> dict[str, int]:
        return {"weight_version": self.version}

    def _set_weight_version(self, version: int) -> dict[str, int]:
        self.version = version
        return {"weight_version": version}

    def _abort_weight_update(self) -> dict[str, bool]:
        self._updating = False
        return {"was_active": True}

    def close(self) -> None:
        with contextlib.suppress(AttributeError):
            self._group.close()
        self._group = None
