"""The controller's half of weight synchronisation: one state machine over client and trainer ranks.

```
IDLE ─pause─▶ PAUSED ─start─▶ UPDATING ─finish─▶ FINISHED ─proof, cache, version, resume─▶ IDLE
                 └──────────────┴───── failed twice, or a proof that does not hold ──▶ BROKEN
```
Generation resumes only on a model that is complete and proven. BROKEN keeps the engines paused and is final.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from skyrl.backends.skyrl_train.weight_sync.base import TrainerRanks, WeightMetadata, WeightSyncClient
from skyrl.backends.skyrl_train.weight_sync.fingerprint import PROOF_COLUMNS, PROOF_TENSORS, draw_plan
from skyrl.backends.skyrl_train.weight_sync.proof import Proof, compare_fingerprints, merge_shards
from skyrl.config.inference_engine import InferenceEngineConfig
from skyrl.errors import WeightProofError, WeightSyncError
from skyrl.types.weights import FingerprintPlan, TensorShard

logger = logging.getLogger(__name__)

ReleaseMemory = Callable[[], Awaitable[None]]


class SyncState(enum.Enum):
    """Where a session stands."""

    IDLE = "idle"
    """Engines generate."""
    PAUSED = "paused"
    """Engines are frozen; their model is complete."""
    UPDATING = "updating"
    """Engines are frozen; their model is not complete."""
    FINISHED = "finished"
    """Engines are frozen; their model is complete and new."""
    BROKEN = "broken"
    """Engines stay frozen for good: what they hold is unknown or wrong."""


class WeightSyncSession:
    """Moves the trainer's weights into every engine, proves that they arrived, and counts the version.

    One session per run. ``reset_cache`` says whether cached keys and values of older weights are dropped after a
    sync (`enable_prefix_caching` must be on too). On shared GPUs (``colocated`` and ``device_type == "cuda"``) the
    engines sleep instead of being paused, and ``release_trainer_memory`` moves the policy off the GPU before the
    key-value cache comes back.
    """

    def __init__(
        self,
        client: WeightSyncClient,
        ranks: TrainerRanks,
        ie_cfg: InferenceEngineConfig,
        *,
        seed: int,
        device_type: str,
        colocated: bool,
        reset_cache: bool = True,
        release_trainer_memory: ReleaseMemory | None = None,
    ) -> None:
        self._client, self._ranks, self._ie_cfg, self._seed = client, ranks, ie_cfg, seed
        self._sleeps = colocated and device_type == "cuda"
        self._reset_cache = reset_cache and ie_cfg.enable_prefix_caching
        self._release_trainer_memory = release_trainer_memory
        self._metadata: WeightMetadata | None = None
        self._shards: dict[str, tuple[TensorShard | None, ...]] = {}
        self._pauses = 0
        self._seconds: dict[str, float] = {}
        self.state = SyncState.IDLE
        self.proof_tensors, self.proof_columns = PROOF_TENSORS, PROOF_COLUMNS

    async def init(self) -> None:
        """Let trainer and engines meet; call again after engines were restarted, before the next push."""
        self._metadata = await self._ranks.init(self._client, self._ie_cfg)
        self._shards = {}

    async def push(self) -> dict[str, float]:
        """Sync the weights.

        Returns:
            ``weight_sync/*``: seconds by phase, bytes, rate, version, tensors proven.

        Raises:
            WeightProofError: an engine holds other weights than the trainer; names the tensors.
            WeightSyncError: the weights did not reach every engine, or the session is broken from before.
        """
        if self.state is SyncState.BROKEN:
            raise WeightSyncError(
                "an earlier weight sync failed and the engines stay paused; restart the engines and resume the run"
            )
        if self._metadata is None:
            await self.init()
        began = time.perf_counter()
        self._seconds = {}
        await self._warn_about_other_versions()
        plan = await self._plan()
        expected = await self._expected(plan)  # before the pause: the trainer's weights stand still
        async with self._paused():
            sent = await self._send()
            version = await self._prove(plan, expected)
        return self._metrics(sent, version, len(plan) if plan else 0, time.perf_counter() - began)

    @asynccontextmanager
    async def pause(self) -> AsyncIterator[None]:
        """Hold the engines frozen for as long as the block runs; pauses nest, only the outermost acts."""
        self._pauses += 1
        try:
            if self._pauses == 1:
                async with self._timed("freeze_s"):
                    await self._client.pause_generation()
                self._move(SyncState.PAUSED)
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0 and self.state in {SyncState.PAUSED, SyncState.FINISHED}:
                async with self._timed("resume_s"):
                    await self._client.resume_generation()
                self._move(SyncState.IDLE)

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        began = time.perf_counter()
        if not self._sleeps:
            async with self.pause():
                yield
        else:
            await self._client.wake_up(tags=["weights"])
            self._move(SyncState.PAUSED)
            yield
            if self._release_trainer_memory is not None:
                await self._release_trainer_memory()
            await self._client.wake_up(tags=["kv_cache"])
            self._move(SyncState.IDLE)
        self._seconds["pause_s"] = time.perf_counter() - began

    async def _send(self) -> dict[str, float]:
        """Send, and once more from the start if the first attempt left the engines incomplete."""
        self._move(SyncState.UPDATING)
        try:
            sent, error = await self._attempt()
            if error is not None:
                logger.warning("the weight transfer failed, sending everything again: %s", error)
                sent = await self._send_again(error)
        except BaseException:
            self._move(SyncState.BROKEN)
            raise
        self._move(SyncState.FINISHED)
        return sent

    async def _attempt(self) -> tuple[dict[str, float], Exception | None]:
        try:
            return await self._ranks.send(self._client, self._ie_cfg), None
        except Exception as error:  # noqa: BLE001 - `_send` logs it and tries again
            return {}, error

    async def _send_again(self, first: Exception) -> dict[str, float]:
        try:
            await self._client.collective_rpc("skyrl_abort_weight_update")
            return await self._ranks.send(self._client, self._ie_cfg)
        except Exception as error:
            raise WeightSyncError(
                f"the weights did not reach the engines, and neither did a second attempt: {error} "
                f"(first attempt: {first}); generation stays paused"
            ) from error

    async def _prove(self, plan: FingerprintPlan | None, expected: dict[str, str]) -> int:
        """Check what the engines hold, drop old caches, and count the version on both sides."""
        try:
            if plan is not None:
                async with self._timed("proof_s"):
                    answers = await self._client.collective_rpc("skyrl_read_back", kwargs={"plan": plan.to_json_dict()})
                self._judge(compare_fingerprints(plan, expected, answers), plan)
            if self._reset_cache:
                async with self._timed("reset_s"):
                    await self._client.reset_prefix_cache(reset_running_requests=True)
            version = self._client.increment_weight_version()
            await self._store_version(version)
        except WeightSyncError:
            self._move(SyncState.BROKEN)
            raise
        except Exception as error:
            self._move(SyncState.BROKEN)
            raise WeightSyncError(f"the weights arrived but could not be put to use: {error}") from error
        return version

    async def _warn_about_other_versions(self) -> None:
        version = self._client.weight_version
        answers = await self._client.collective_rpc("skyrl_get_weight_version")
        others = {url: workers for url, workers in answers.items() if _versions(workers) != {version}}
        if others and version > 0:
            logger.warning(
                "engines should hold weight version %d and report %s: they were restarted or updated by someone else, "
                "so what they generated since the last sync came from other weights",
                version,
                others,
            )

    async def _store_version(self, version: int) -> None:
        answers = await self._client.collective_rpc("skyrl_set_weight_version", kwargs={"version": version})
        wrong = {url: workers for url, workers in answers.items() if _versions(workers) != {version}}
        if wrong:
            raise WeightProofError(f"engines should hold weight version {version} and report {wrong}")

    def _judge(self, proof: Proof, plan: FingerprintPlan) -> None:
        if proof.unreadable:
            logger.warning("weight proof: only the wire was checked for %s", "; ".join(proof.unreadable[:4]))
        if proof.wrong:
            raise WeightProofError(
                f"after the sync to weight version {plan.version} engines hold other weights than the trainer in "
                f"{len(proof.wrong)} of {len(plan)} sampled tensors: {'; '.join(proof.wrong[:8])}; "
                "generation stays paused"
            )

    async def _plan(self) -> FingerprintPlan | None:
        if self._ie_cfg.weight_proof == "off" or self._metadata is None:
            return None
        if not self._shards:
            shapes = dict(zip(self._metadata["names"], self._metadata["shapes"], strict=True))
            answers = await self._client.collective_rpc("skyrl_weight_shards", kwargs={"shapes": shapes})
            self._shards = merge_shards(answers)
        return draw_plan(
            self._metadata,
            seed=self._seed,
            version=self._client.weight_version + 1,
            num_tensors=self.proof_tensors,
            num_columns=self.proof_columns,
            shards=self._shards,
        )

    async def _expected(self, plan: FingerprintPlan | None) -> dict[str, str]:
        if plan is None:
            return {}
        async with self._timed("fingerprint_s"):
            return await self._ranks.fingerprint(plan)

    def _metrics(self, sent: dict[str, float], version: int, proven: int, total_s: float) -> dict[str, float]:
        values = {"proof_s": 0.0, "reset_s": 0.0} | self._seconds | sent
        send_s = sent.get("send_s", 0.0)
        values["total_s"] = total_s
        values["gb_per_s"] = sent.get("bytes", 0.0) / 1e9 / send_s if send_s > 0 else 0.0
        values["version"], values["proof_tensors"] = float(version), float(proven)
        return {f"weight_sync/{name}": value for name, value in values.items()}

    @asynccontextmanager
    async def _timed(self, name: str) -> AsyncIterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - began

    def _move(self, state: SyncState) -> None:
        logger.debug("weight sync: %s -> %s %s", self.state.value, state.value, self._seconds)
        self.state = state


def _versions(workers: list[Any]) -> set[int]:
    return {worker["weight_version"] for worker in workers}
