"""The child process of ``VLLMRouter``: ``python -m ...router_process``, arguments as one JSON line on standard input.

Standard input is also the lifeline: when the parent ends, however it ends, the pipe closes and the router is killed.
The router's native code keeps the interpreter's lock for as long as it serves, so it runs in a fork of this process,
which only waits.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from typing import Any

PR_SET_PDEATHSIG = 1
SIGNAL_EXIT_BASE = 128


def main() -> int:
    """Run the router until it ends, SIGTERM comes or the parent is gone; its exit code."""
    values = json.loads(sys.stdin.readline())
    me = os.getpid()
    child = os.fork()  # safe: nothing but the standard library is loaded, and there is one thread
    if child == 0:
        _serve(values, me)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    threading.Thread(target=_kill_with_parent, args=(child,), name="parent-watch", daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return SIGNAL_EXIT_BASE - code if code < 0 else code


def _serve(values: dict[str, Any], waiting: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != waiting:
        os._exit(1)
    from vllm_router.launch_router import launch_router
    from vllm_router.router_args import RouterArgs

    values["prefill_urls"] = [(url, port) for url, port in values.get("prefill_urls", [])]
    launch_router(RouterArgs(**values))
    sys.exit(0)


def _kill_with_parent(child: int) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
