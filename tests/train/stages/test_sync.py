"""Weights to the engines."""

import asyncio

from skyrl.train.stages.sync import SyncStage
from tests.fakes.worker_dispatch import FakeWorkerDispatch


def test_init_connects_and_every_push_gives_the_next_version():
    async def run():
        await stage.init()
        return [await stage.push(), await stage.push()]

    dispatch = FakeWorkerDispatch()
    stage = SyncStage(dispatch, "client")
    assert asyncio.run(run()) == [{"weight_sync/version": 1.0}, {"weight_sync/version": 2.0}]
    assert [name for name, _ in dispatch.calls] == ["init_weight_sync_state"] + ["save_weights_for_sampler"] * 2
