import pytest

from skyrl.backends.skyrl_train.weight_sync import get_transfer_strategy
from skyrl.backends.skyrl_train.weight_sync.broadcast import BroadcastTransferStrategy
from skyrl.backends.skyrl_train.weight_sync.cuda_ipc import CudaIpcTransferStrategy
from skyrl.backends.skyrl_train.weight_sync.gloo import GlooTransferStrategy
from skyrl.backends.skyrl_train.weight_sync.group_sender import BroadcastInitInfo
from skyrl.errors import ConfigError


@pytest.mark.parametrize(
    ("backend", "colocated", "device", "strategy"),
    [
        ("nccl", True, "cuda", CudaIpcTransferStrategy),
        ("nccl", False, "cuda", BroadcastTransferStrategy),
        ("auto", True, "cuda", CudaIpcTransferStrategy),
        ("auto", False, "cuda", BroadcastTransferStrategy),
        ("auto", True, "cpu", GlooTransferStrategy),
        ("auto", False, "cpu", GlooTransferStrategy),
        ("gloo", False, "cuda", GlooTransferStrategy),
    ],
)
def test_the_backend_and_the_devices_choose_the_strategy(backend, colocated, device, strategy):
    assert get_transfer_strategy(backend, colocated, device) is strategy


@pytest.mark.parametrize("backend", ["delta", "sharded_rdt", "rdt"])
def test_what_is_not_built_is_refused(backend):
    with pytest.raises(ConfigError, match=f"weight_sync_backend={backend} is not built yet"):
        get_transfer_strategy(backend, False, "cuda")


def test_unknown_backends_and_nccl_without_gpus_are_refused():
    with pytest.raises(ConfigError, match="'mpi' is unknown"):
        get_transfer_strategy("mpi", False, "cpu")
    with pytest.raises(ConfigError, match="nccl needs GPUs"):
        get_transfer_strategy("nccl", False, "cpu")


def test_receivers_have_names_of_their_own():
    strategies = [GlooTransferStrategy, BroadcastTransferStrategy, CudaIpcTransferStrategy]
    names = {strategy.get_vllm_transfer_engine() for strategy in strategies}
    assert len(names) == 3
    assert not names & {"nccl", "ipc", "sparse_nccl"}  # vLLM's own


@pytest.mark.parametrize(
    ("dp_size", "per_server", "offsets"), [(1, 2, [1, 3, 5, 7]), (2, 4, [1, 1, 5, 5]), (4, 8, [1, 1, 1, 1])]
)
def test_servers_of_one_deployment_share_a_rank_offset(dp_size, per_server, offsets):
    info = BroadcastInitInfo(master_address="h", master_port=1, world_size=9, timeout_s=1.0)
    assert [part.rank_offset for part in info.for_servers(per_server, 4, dp_size)] == offsets


def test_the_payload_is_what_the_receiver_takes():
    info = BroadcastInitInfo(master_address="h", master_port=1, world_size=9, timeout_s=2.0)
    assert info.to_api_payload() == {
        "master_address": "h",
        "master_port": 1,
        "rank_offset": 1,
        "world_size": 9,
        "timeout_s": 2.0,
    }
