"""Start and stop vllm-router, which spreads the data plane over several servers."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import difflib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import skyrl
from skyrl.backends.skyrl_train.inference_servers.common import LOOPBACK, ServerInfo, find_and_reserve_port
from skyrl.backends.skyrl_train.inference_servers.health import answers_health
from skyrl.errors import ConfigError, DeadlineError, InferenceError

logger = logging.getLogger(__name__)

HTTP_START_PORT = 30000
METRICS_START_PORT = 29000
START_TIMEOUT_S = 120.0
ROUTER_START_KEY = "router start"
POLL_S = 0.05
TERMINATE_GRACE_S = 5.0
KILL_GRACE_S = 5.0
LOG_TAIL_BYTES = 2000


class VLLMRouter:
    """A router in a child process that dies with this one.

    Args:
        router_args: Keyword arguments of ``RouterArgs`` (``build_router_args``); ``port`` and ``prometheus_port`` are
            chosen here when missing.
        log_path: Folder of ``router-<time>.log``; None sends the router's output nowhere.
    """

    def __init__(self, router_args: Mapping[str, Any], log_path: str | Path | None = None) -> None:
        self._args = dict(router_args)
        self._log_folder = None if log_path is None else Path(log_path).expanduser()
        self._log_file: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process_id(self) -> int | None:
        """Id of the child; None before ``start`` and after ``shutdown``."""
        return None if self._process is None else self._process.pid

    def start(self) -> str:
        """Start the router and wait until it is healthy; its URL. The servers must be healthy already.

        Raises:
            ConfigError: ``router_init_kwargs`` names an argument that the router does not have.
            InferenceError: The child ended; names its exit code and the end of its log.
            DeadlineError: It was not healthy in time.
        """
        _check_names(self._args)
        host = self._args.setdefault("host", LOOPBACK)
        with contextlib.ExitStack() as reserved:  # ports are let go as late as possible: the child binds next
            for key, first, address in (
                ("port", HTTP_START_PORT, host),
                ("prometheus_port", METRICS_START_PORT, LOOPBACK),
            ):
                if self._args.get(key) is None:
                    self._args[key], sock = find_and_reserve_port(first, address)
                    reserved.enter_context(sock)
            self._args.setdefault("prometheus_host", LOOPBACK)
        self._process = self._spawn()
        info = ServerInfo(host, self._args["port"])
        try:
            self._wait_until_healthy(info)
        except BaseException:
            self.shutdown()
            raise
        logger.info("Router for %d server(s) at %s", len(self._args.get("worker_urls", ())), info.url)
        return info.url

    def shutdown(self) -> None:
        """Stop the child: SIGTERM, 5 s, SIGKILL, at most 5 s more. Does nothing when it does not run."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(TERMINATE_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            try:
                process.wait(KILL_GRACE_S)
            except subprocess.TimeoutExpired:
                logger.error("the router (process %d) still runs %g s after SIGKILL", process.pid, KILL_GRACE_S)
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "skyrl.backends.skyrl_train.inference_servers.router_process"]
        with contextlib.ExitStack() as stack:
            output: Any = subprocess.DEVNULL
            if self._log_folder is not None:
                self._log_folder.mkdir(parents=True, exist_ok=True)
                self._log_file = self._log_folder / f"router-{datetime.datetime.now():%y%m%d_%H%M%S_%f}.log"
                output = stack.enter_context(self._log_file.open("wb"))
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=_child_environment()
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the child died at once; the health wait says why
            process.stdin.write(json.dumps(self._args).encode() + b"\n")
            process.stdin.flush()
        return process

    def _wait_until_healthy(self, info: ServerInfo) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers_health(info.url):
            code = self._process.poll()
            if code is not None:
                raise InferenceError(f"the router at {info.url} ended with exit code {code}: {self._log_tail()}")
            if time.monotonic() > deadline:
                raise DeadlineError(
                    "the controller",
                    f"the router at {info.url}",
                    START_TIMEOUT_S,
                    ROUTER_START_KEY,
                    f"are all servers healthy? its log ends with: {self._log_tail()}",
                )
            time.sleep(POLL_S)

    def _log_tail(self) -> str:
        if self._log_file is None:
            return "(no log was kept)"
        return self._log_file.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(its log is empty)"


def _child_environment() -> dict[str, str]:
    """This process's environment, with the folder of this library on the import path."""
    library = str(Path(skyrl.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [library, os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": ""}


def _check_names(args: Mapping[str, Any]) -> None:
    from vllm_router.router_args import RouterArgs

    known = [field.name for field in dataclasses.fields(RouterArgs)]
    for name in args:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3) or known
            raise ConfigError(
                f"generator.inference_engine.router_init_kwargs.{name} is no argument of the router; "
                f"near names: {', '.join(near)}"
            )
