import multiprocessing
import time

import pytest
import torch

from skyrl.backends.skyrl_train.weight_sync.gloo import GlooTransferStrategy
from skyrl.backends.skyrl_train.weight_sync.group import Rendezvous, build_gloo_group, join_store
from skyrl.backends.skyrl_train.weight_sync.packing import plan_buckets
from skyrl.backends.skyrl_train.weight_sync.pipeline import SingleRank
from skyrl.config.inference_engine import InferenceEngineConfig
from skyrl.errors import DeadlineError, WeightSyncError
from tests.fakes.weights import DictExtractor, FakeEngine

WEIGHTS = {"a": torch.randn(64, 8), "b": torch.randn(300), "c": torch.randn(7, 3)}


def config(timeout_s=4.0):
    return InferenceEngineConfig(
        model_dtype="float32", weight_sync_timeout_s=timeout_s, weight_transfer_threshold_cuda_ipc_GB=1500 / 2**30
    )


async def open_sender(engine, cfg):
    info = GlooTransferStrategy.create_init_info(cfg, 1, server_urls=engine.server_urls)
    sender = GlooTransferStrategy.create_sender(
        info, engine, ie_cfg=cfg, agreement=SingleRank(), device=torch.device("cpu")
    )
    await sender.open()
    return sender


async def send(sender, weights=WEIGHTS):
    extractor = DictExtractor(weights)
    metadata = extractor.get_weight_metadata(torch.float32)
    return await sender.send_chunks(extractor.extract_weights(torch.float32), metadata)


@pytest.fixture
def engine():
    fake = FakeEngine()
    fake.paused = True
    yield fake
    fake.close()


async def test_many_transfers_over_one_group(engine):
    sender = await open_sender(engine, config())
    for round_number in range(3):
        weights = {name: tensor + round_number for name, tensor in WEIGHTS.items()}
        report = await send(sender, weights)
        assert all(torch.equal(engine.held[name], tensor) for name, tensor in weights.items())
    assert report["bytes"] == 64 * 8 * 4 + 300 * 4 + 96  # the last tensor is padded from 84 bytes
    assert engine.calls == ["init"] + ["start", "update", "update", "finish"] * 3
    assert sender.usable
    sender.teardown()
    assert not sender.usable


async def test_an_engine_that_refuses_a_bucket_ends_the_transfer_at_once(engine):
    sender = await open_sender(engine, config(timeout_s=60.0))

    async def refuse(update_info):
        raise RuntimeError("engine says no")

    engine.update_named_weights = refuse
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match="engine says no"):
        await send(sender)
    assert time.monotonic() - began < 10
    assert not sender.usable
    sender.teardown()


async def test_an_engine_that_never_answers_runs_into_the_deadline(engine):
    sender = await open_sender(engine, config(timeout_s=1.0))

    async def hang(update_info):
        import asyncio

        await asyncio.sleep(60)

    engine.update_named_weights = hang
    with pytest.raises(DeadlineError, match=r"bucket 1 of 2.*weight_sync_timeout_s"):
        await send(sender)
    sender.teardown()


async def test_engines_that_never_come_are_named(engine):
    async def stay_away(init_info):
        import asyncio

        await asyncio.sleep(60)

    engine.init_weight_update_communicator = stay_away
    with pytest.raises(DeadlineError, match=r"never came: \[1\]"):
        await open_sender(engine, config(timeout_s=1.0))


async def test_metadata_is_needed(engine):
    sender = await open_sender(engine, config())
    with pytest.raises(ValueError, match="metadata"):
        await sender.send_chunks(iter(()))
    sender.teardown()


def receive_in_another_process(port, sizes, results):
    group = build_gloo_group(join_store("127.0.0.1", port, 1, 2, 30), 1, 2, address="127.0.0.1", timeout_s=30)
    for size in sizes:
        buffer = torch.empty(size, dtype=torch.uint8)
        group.broadcast(buffer).wait()
        results.put(buffer.numpy().tobytes())
    group.close()


def test_bytes_arrive_in_another_process():
    metadata = DictExtractor(WEIGHTS).get_weight_metadata(torch.float32)
    sizes = [layout.size_bytes for layout in plan_buckets(metadata, 1500)]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    meeting = Rendezvous("127.0.0.1", 2, 30)
    peer = context.Process(target=receive_in_another_process, args=(meeting.port, sizes, results))
    peer.start()
    group = build_gloo_group(meeting.store, 0, 2, address="127.0.0.1", timeout_s=30)
    sent = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    for buffer in sent:
        group.broadcast(buffer).wait()
    assert [results.get(timeout=30) for _ in sizes] == [buffer.numpy().tobytes() for buffer in sent]
    assert meeting.missing_ranks() == []
    peer.join(30)
    group.close()
