"""Two trainer processes over gloo, with the engine in the process of rank 0."""

import asyncio
import multiprocessing
import traceback

import pytest
import torch
import torch.distributed as dist

from skyrl.backends.skyrl_train.weight_sync.fingerprint import fingerprint_tensors, full_plan
from skyrl.backends.skyrl_train.weight_sync.pipeline import GroupAgreement, OtherRankFailed
from skyrl.backends.skyrl_train.weight_sync.worker_mixin import WeightSyncWorkerMixin
from skyrl.config.inference_engine import InferenceEngineConfig
from skyrl.errors import WeightSyncError
from skyrl.types.weights import WeightChunk
from tests.fakes.weights import DictExtractor, FakeEngine

WORLD = 2
SHAPES = {"a": [6, 4], "b": [10], "c": [2, 2]}


def whole_weights():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class ShardedExtractor(DictExtractor):
    """Each rank holds half of the rows of every tensor; whole ones are gathered."""

    def __init__(self, rank):
        super().__init__(whole_weights())
        self.shards = {name: tensor.chunk(WORLD)[rank] for name, tensor in self.weights.items()}
        self.gathers = 0

    def gather(self, name):
        self.gathers += 1
        parts = [torch.empty_like(self.shards[name]) for _ in range(WORLD)]
        dist.all_gather(parts, self.shards[name])
        return torch.cat(parts)

    def extract_weights(self, dtype):
        for name, shape in SHAPES.items():
            yield WeightChunk([name], [str(dtype)], [shape], [self.gather(name)])

    def extract_named(self, names, dtype):
        for name in names:
            yield name, self.gather(name).to(dtype)


class Worker(WeightSyncWorkerMixin):
    is_colocated = False

    def __init__(self, rank):
        self.rank, self.world_size = rank, WORLD
        self.weight_extractor = ShardedExtractor(rank)


async def scenario(rank):
    cfg = InferenceEngineConfig(
        model_dtype="float32", weight_sync_timeout_s=20.0, weight_transfer_threshold_cuda_ipc_GB=64 / 2**30
    )
    engine, worker = FakeEngine(), Worker(rank)
    engine.paused = True

    agreement = GroupAgreement(dist.new_group(backend="gloo"))
    assert agreement.gather_text(f"rank {rank} ü") == ["rank 0 ü", "rank 1 ü"]
    assert agreement.gather_text("x" * rank) == ["", "x"]
    assert agreement.all_ok(True)
    assert not agreement.all_ok(rank == 0)

    metadata = await worker.init_weight_sync_state(engine, cfg)
    assert metadata["names"] == list(SHAPES)
    report = await worker.broadcast_to_inference_engines(engine, cfg)
    assert bool(report) == (rank == 0)

    engine.fail_on["update"] = [RuntimeError("boom")]
    with pytest.raises(WeightSyncError if rank == 0 else OtherRankFailed):
        await worker.broadcast_to_inference_engines(engine, cfg)
    await worker.broadcast_to_inference_engines(engine, cfg)  # meets the engine again first
    if rank == 0:
        assert engine.calls.count("init") == 2
        assert all(torch.equal(engine.held[name], tensor) for name, tensor in whole_weights().items())

    plan = full_plan(metadata, version=1)
    assert worker.weight_fingerprint(plan) == fingerprint_tensors(whole_weights().items(), plan)
    worker.teardown_weight_sync()
    engine.close()


def run_rank(rank, port, outcomes):
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
        asyncio.run(scenario(rank))
        outcomes.put((rank, "ok"))
    except BaseException:  # noqa: BLE001 - reported to the test
        outcomes.put((rank, traceback.format_exc()))
    finally:
        dist.destroy_process_group()


def test_two_ranks_send_fail_together_and_recover():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    context = multiprocessing.get_context("spawn")
    outcomes = context.Queue()
    processes = [context.Process(target=run_rank, args=(rank, port, outcomes)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    results = dict(outcomes.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(30)
    assert results == {0: "ok", 1: "ok"}
