"""The child process of ``VLLMRouter``: ``python -m ...router_process``, arguments as one JSON line on standard input.

Standard input is also the lifeline: when the parent ends, however it ends, the pipe closes and this process exits.
"""

from __future__ import annotations

import json
import os
import sys
import threading


def main() -> None:
    """Read the arguments, watch the lifeline, run the router until it ends."""
    values = json.loads(sys.stdin.readline())
    threading.Thread(target=_exit_with_parent, name="parent-watch", daemon=True).start()

    from vllm_router.launch_router import launch_router
    from vllm_router.router_args import RouterArgs

    values["prefill_urls"] = [(url, port) for url, port in values.get("prefill_urls", [])]
    launch_router(RouterArgs(**values))


def _exit_with_parent() -> None:
    while sys.stdin.buffer.raw.read(4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
