"""Addresses and ports of servers."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from skyrl.backends.skyrl_train.cluster import LOOPBACK, get_node_ip
from skyrl.errors import ResourceError

__all__ = ["LOOPBACK", "PORT_WINDOW", "ServerInfo", "find_and_reserve_port", "get_node_ip"]

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
