"""Addresses and ports of servers."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from skyrl.errors import ResourceError

LOOPBACK = "127.0.0.1"
PORT_WINDOW = 100
"""Ports of one server: its HTTP port lies in ``[start_port, start_port + PORT_WINDOW)``."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Where a server listens. Example: ``ServerInfo("127.0.0.1", 8000).url == "http://127.0.0.1:8000"``."""

    ip: str
    port: int

    @property
    def url(self) -> str:
        """Base URL."""
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"http://{host}:{self.port}"


def get_node_ip() -> str:
    """Address under which the whole cluster reaches this node: the loopback where there is one node only."""
    import ray

    if not ray.is_initialized() or is_single_node():
        return LOOPBACK
    return ray.util.get_node_ip_address().strip("[]")


def is_single_node() -> bool:
    """Whether the Ray cluster has one node; nothing then listens outside of it."""
    import ray

    return sum(bool(node["Alive"]) for node in ray.nodes()) <= 1


def get_open_port(host: str = LOOPBACK) -> int:
    """A port that is free now. Prefer ``find_and_reserve_port``, which keeps it."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def find_and_reserve_port(start_port: int, host: str = LOOPBACK) -> tuple[int, socket.socket]:
    """The first free port in ``[start_port, start_port + 100)``, and the bound socket that keeps it.

    The socket does not listen, so early callers are refused instead of waiting for an answer; nobody else can bind the
    port. Give it to the server, or close it right before the server binds.

    Raises:
        ResourceError: The whole window is taken.
    """
    for port in range(start_port, start_port + PORT_WINDOW):
        sock = socket.socket(_family(host), socket.SOCK_STREAM)
        try:
            sock.bind((host, port))
        except OSError:
            sock.close()
            continue
        return port, sock
    raise ResourceError(
        f"ports {start_port} to {start_port + PORT_WINDOW - 1} of {host} are all in use; stop what listens there "
        "(another run?) or start the servers on other ports"
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
