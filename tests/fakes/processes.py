"""Whether processes and ports that a test left behind are gone."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def is_gone(pid: int) -> bool:
    """Whether the process ended; a zombie that nobody reaped has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_port_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether nobody listens there."""
    with socket.socket() as sock:
        return sock.connect_ex((host, port)) != 0


def eventually(fact: Callable[[], bool], timeout_s: float = 15.0) -> bool:
    """Whether ``fact`` becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while not fact():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def processes_of(folder: Path) -> list[str]:
    """Command lines of the processes of a run whose `trainer.log_path` lies in ``folder``."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in process.environ().get("SKYRL_LOG_FILE", ""):
                found.append(" ".join(process.cmdline())[:120])
        except psutil.Error:
            continue
    return found
