"""The process group between trainer rank 0 and every engine worker: rank 0 broadcasts, the others receive.

It stands beside the default groups of trainer and engine and touches neither. Both sides use this module.
"""

from __future__ import annotations

import datetime
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from skyrl import env_vars
from skyrl.errors import WeightSyncError

_PREFIX = "skyrl_weights"
_MARGIN_S = 5.0
"""By how much rank 0's own deadline, which names who is missing, comes before torch's."""


class TransferGroup(Protocol):
    """A group that can broadcast bytes from its rank 0."""

    def broadcast(self, buffer: torch.Tensor) -> dist.Work:
        """Start sending (rank 0) or receiving (others) ``buffer``, uint8; sizes must be equal everywhere."""
        ...

    def close(self) -> None:
        """Leave the group; a transfer in flight must have ended or been abandoned."""
        ...


class TorchTransferGroup:
    """A gloo or NCCL process group of torch, held together with the store it was built over."""

    def __init__(self, group: Any, store: dist.Store, transfer_timeout_s: float) -> None:
        self._group = group
        self._store: dist.Store | None = store
        self._timeout = datetime.timedelta(seconds=transfer_timeout_s)

    def broadcast(self, buffer: torch.Tensor) -> dist.Work:
        """See `TransferGroup.broadcast`."""
        if self._group is None:
            raise WeightSyncError("the weight transfer group is closed; initialise it again")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._timeout
        work: dist.Work = self._group.broadcast([buffer], options)
        return work

    def close(self) -> None:
        """See `TransferGroup.close`."""
        if isinstance(self._group, dist.ProcessGroupNCCL if dist.is_nccl_available() else ()):
            self._group.abort()
        self._group = None
        self._store = None


class Rendezvous:
    """Rank 0's meeting point: a store bound to a free port of one address, held until the group ends."""

    def __init__(self, host: str, world_size: int, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=max(128, world_size))
        self.host: str = host
        self.port: int = listener.getsockname()[1]
        self.world_size = world_size
        self.timeout_s = timeout_s + _MARGIN_S
        self.store = dist.TCPStore(
            host,
            self.port,
            world_size,
            is_master=True,
            timeout=datetime.timedelta(seconds=timeout_s + _MARGIN_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def missing_ranks(self) -> list[int]:
        """Ranks that have not come to the meeting point yet."""
        # A connection of its own: a group that is being built holds the other one until it is complete.
        store = _connect(self.host, self.port, self.world_size, self.timeout_s)
        return [rank for rank in range(1, self.world_size) if not store.check([_joined_key(rank)])]


def _joined_key(rank: int) -> str:
    return f"joined/{rank}"


def join_store(host: str, port: int, rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Connect to rank 0's store and leave a mark there, so that rank 0 can name who is missing."""
    store = _connect(host, port, world_size, timeout_s)
    store.set(_joined_key(rank), "1")
    return store


def _connect(host: str, port: int, world_size: int, timeout_s: float) -> dist.TCPStore:
    patience = datetime.timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, world_size, is_master=False, timeout=patience, wait_for_workers=False)


def build_gloo_group(
    store: dist.Store, rank: int, world_size: int, *, address: str, timeout_s: float
) -> TorchTransferGroup:
    """Build the gloo group, listening on ``address``; returns when every rank has joined.

    ``timeout_s`` bounds the meeting; each later transfer has half of it.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = datetime.timedelta(seconds=timeout_s)
    options._threads = 1
    group = dist.ProcessGroupGloo(dist.PrefixStore(_PREFIX, store), rank, world_size, options)
    return TorchTransferGroup(group, store, timeout_s / 2)


def build_nccl_group(
    store: dist.Store, rank: int, world_size: int, *, device: torch.device, timeout_s: float
) -> TorchTransferGroup:
    """Build the NCCL group on ``device``; returns when every rank has joined.

    ``timeout_s`` bounds the meeting; each later transfer has half of it. NCCL connects at the first collective, so
    one word is broadcast here: a failure shows at once, and not in the middle of an update.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=timeout_s)
    with torch.cuda.device(device):
        group = dist.ProcessGroupNCCL(dist.PrefixStore(_PREFIX, store), rank, world_size, options)
        transfer = TorchTransferGroup(group, store, timeout_s / 2)
        transfer.broadcast(torch.zeros(16, dtype=torch.uint8, device=device)).wait()
        torch.cuda.synchronize(device)
    return transfer


def address_towards(host: str, port: int) -> str:
    """The address of this machine on the route to ``host``; loopback when ``host`` is."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def trainer_address(server_urls: Sequence[str]) -> str:
    """Address at which the engines reach this process.

    `SKYRL_WEIGHT_SYNC_HOST` wins; loopback when every server is on it; else this machine's address on the route
    to the first server that is elsewhere.
    """
    if env_vars.SKYRL_WEIGHT_SYNC_HOST:
        return env_vars.SKYRL_WEIGHT_SYNC_HOST
    for url in server_urls:
        parts = urlsplit(url)
        resolved = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)[0][4]
        if not ipaddress.ip_address(str(resolved[0]).partition("%")[0]).is_loopback:
            return address_towards(str(resolved[0]), int(resolved[1]))
    return "127.0.0.1"
