import pytest
import torch

from skyrl.backends.skyrl_train.weight_sync.session import SyncState, WeightSyncSession
from skyrl.config.inference_engine import InferenceEngineConfig
from skyrl.errors import WeightProofError, WeightSyncError
from tests.fakes.weights import DictExtractor, FakeEngine, SoloTrainer

WEIGHTS = {
    "embed": torch.randn(32, 8),
    "layer.0": torch.randn(8, 8),
    "layer.1": torch.randn(8, 8),
    "norm": torch.ones(8),
}


def config(**changes):
    # Buckets of 600 bytes: the embedding alone, then the rest.
    values = {
        "model_dtype": "float32",
        "weight_sync_timeout_s": 4.0,
        "weight_transfer_threshold_cuda_ipc_GB": 600 / 2**30,
    }
    return InferenceEngineConfig(**(values | changes))


@pytest.fixture
def engine():
    fake = FakeEngine()
    yield fake
    fake.close()


def make_session(engine, extractor=None, *, cfg=None, **options):
    trainer = SoloTrainer(extractor or DictExtractor(WEIGHTS))
    options = {"seed": 1, "device_type": "cpu", "colocated": False} | options
    return WeightSyncSession(engine, trainer, cfg or config(), **options), trainer


def order(engine):
    steps = ("pause", "start", "update", "finish", "read_back", "reset", "set_weight_version", "resume")
    return [call for call in engine.calls if call in steps]


async def test_a_push_moves_every_weight_and_counts_the_version(engine):
    session, _ = make_session(engine)
    metrics = await session.push()
    assert all(torch.equal(engine.held[name], tensor) for name, tensor in WEIGHTS.items())
    assert order(engine) == [
        "pause",
        "start",
        "update",
        "update",
        "finish",
        "read_back",
        "reset",
        "set_weight_version",
        "resume",
    ]
    assert session.state is SyncState.IDLE
    assert engine.version == engine.weight_version == metrics["weight_sync/version"] == 1
    assert metrics["weight_sync/bytes"] == sum(tensor.nbytes for tensor in WEIGHTS.values())
    assert metrics["weight_sync/proof_tensors"] == 4
    phases = {
        "total_s",
        "pause_s",
        "gather_s",
        "send_s",
        "load_s",
        "proof_s",
        "start_s",
        "finish_s",
        "resume_s",
        "freeze_s",
    }
    assert phases <= {name.removeprefix("weight_sync/") for name in metrics}


async def test_the_second_push_meets_nobody_again(engine):
    session, trainer = make_session(engine)
    await session.push()
    trainer.weight_extractor = DictExtractor({name: tensor + 1 for name, tensor in WEIGHTS.items()})
    await session.push()
    assert engine.calls.count("init") == 1
    assert torch.equal(engine.held["norm"], torch.full((8,), 2.0))
    assert engine.version == 2


async def test_no_cache_reset_without_prefix_caching_or_when_caches_are_kept(engine):
    session, _ = make_session(engine, cfg=config(enable_prefix_caching=False))
    await session.push()
    session, _ = make_session(engine, reset_cache=False)
    await session.push()
    assert "reset" not in engine.calls


async def test_proof_off_reads_nothing_back(engine):
    session, _ = make_session(engine, cfg=config(weight_proof="off"))
    metrics = await session.push()
    assert "read_back" not in engine.calls
    assert metrics["weight_sync/proof_tensors"] == 0


@pytest.mark.parametrize("step", ["start", "update", "finish"])
async def test_a_transfer_that_fails_once_is_sent_again_from_the_start(engine, step):
    session, _ = make_session(engine)
    await session.init()
    engine.fail_on[step] = [RuntimeError("boom")]
    await session.push()
    assert engine.calls.count("abort_weight_update") == 1
    assert session.state is SyncState.IDLE
    assert not engine.paused
    assert all(torch.equal(engine.held[name], tensor) for name, tensor in WEIGHTS.items())


@pytest.mark.parametrize(
    "step", ["start", "update", "finish", "abort_weight_update", "read_back", "reset", "set_weight_version"]
)
async def test_a_step_that_keeps_failing_leaves_the_engine_paused(engine, step):
    session, _ = make_session(engine)
    await session.init()
    engine.fail_on[step] = [RuntimeError("boom") for _ in range(9)]
    if step == "abort_weight_update":
        engine.fail_on["start"] = [RuntimeError("boom")]
    with pytest.raises(WeightSyncError, match="boom"):
        await session.push()
    assert session.state is SyncState.BROKEN
    assert engine.paused
    assert "resume" not in engine.calls
    with pytest.raises(WeightSyncError, match="engines stay paused"):
        await session.push()


async def test_a_failed_pause_changes_nothing(engine):
    session, _ = make_session(engine)
    engine.fail_on["pause"] = [RuntimeError("boom")]
    with pytest.raises(RuntimeError, match="boom"):
        await session.push()
    assert session.state is SyncState.IDLE
    assert "start" not in engine.calls
    await session.push()


async def test_pauses_nest_and_resume_once(engine):
    session, _ = make_session(engine)
    async with session.pause():
        await session.push()
        assert engine.paused
        assert "resume" not in engine.calls
    assert engine.calls.count("pause") == engine.calls.count("resume") == 1
    assert session.state is SyncState.IDLE


async def test_an_error_of_the_caller_inside_a_pause_resumes(engine):
    session, _ = make_session(engine)
    with pytest.raises(KeyError):
        async with session.pause():
            raise KeyError
    assert not engine.paused


FAULTS = {
    "stale": ({name: tensor + 0.1 for name, tensor in WEIGHTS.items()}, set(WEIGHTS)),
    "swapped": (WEIGHTS | {"layer.0": WEIGHTS["layer.1"], "layer.1": WEIGHTS["layer.0"]}, {"layer.0", "layer.1"}),
    "cast": ({name: t.to(torch.bfloat16).float() for name, t in WEIGHTS.items()}, set(WEIGHTS) - {"norm"}),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_other_weights_in_the_engine_are_named(engine, fault):
    sent, wrong = FAULTS[fault]
    session, _ = make_session(engine, DictExtractor(WEIGHTS, sent))
    with pytest.raises(WeightProofError) as caught:
        await session.push()
    assert {name for name in WEIGHTS if f"{name} on" in str(caught.value)} == wrong
    assert engine.paused
    assert session.state is SyncState.BROKEN
    assert engine.weight_version == 0


async def test_a_tensor_that_the_engine_lost_is_named(engine):
    class Forgetful(FakeEngine):
        async def finish_weight_update(self):
            await super().finish_weight_update()
            del self.held["layer.1"]

    forgetful = Forgetful()
    session, _ = make_session(forgetful)
    with pytest.raises(WeightProofError, match=r"layer.1 on .* holds no such tensor"):
        await session.push()
    forgetful.close()


async def test_an_engine_that_does_not_take_the_version_is_an_error(engine):
    engine._set_weight_version = lambda version: {"weight_version": 0}
    session, _ = make_session(engine)
    with pytest.raises(WeightProofError, match="should hold weight version 1"):
        await session.push()


async def test_a_restarted_engine_is_noticed(engine, caplog):
    session, _ = make_session(engine)
    await session.push()
    engine.version = 0
    await session.push()
    assert "they were restarted or updated by someone else" in caplog.text
    assert engine.version == 2


async def test_shared_gpus_wake_instead_of_pausing(engine):
    released = []

    async def release():
        released.append(list(engine.calls))

    engine.paused = True  # asleep
    session, _ = make_session(engine, device_type="cuda", colocated=True, release_trainer_memory=release)
    await session.push()
    assert "pause" not in engine.calls
    assert "resume" not in engine.calls
    wakes = [call for call in engine.calls if call.startswith("wake")]
    assert wakes == ["wake ['weights']", "wake ['kv_cache']"]
    assert "finish" in released[0]
    assert wakes[1] not in released[0]
