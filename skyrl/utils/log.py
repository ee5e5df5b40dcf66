"""Logging set-up of the driver and of every worker process."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

_QUIET = (
    "absl", "aiohttp", "asyncio", "botocore", "datasets", "filelock", "fsspec", "git", "httpcore", "httpx",
    "huggingface_hub", "matplotlib", "PIL", "torch", "transformers", "urllib3", "wandb",
)  # fmt: skip
_LINE = "%(asctime)s %(levelname)-7s %(name)s:%(lineno)d %(message)s"
_MARK = "_skyrl_handler"


def resolve_level(level: str | int | None = None) -> int:
    """Number of a log level; None reads ``LOG_LEVEL`` (default INFO).

    Raises:
        ValueError: The name is no level; lists those that are.
    """
    chosen = os.environ.get("LOG_LEVEL", "") or "INFO" if level is None else level
    if isinstance(chosen, int):
        return chosen
    number = logging.getLevelNamesMapping().get(chosen.strip().upper())
    if number is None:
        names = ", ".join(name for name in logging.getLevelNamesMapping() if name != "NOTSET")
        raise ValueError(f"LOG_LEVEL={chosen!r} is no log level; use one of {names}")
    return number


def configure_logging(level: str | int | None = None, stream: TextIO | None = None) -> None:
    """Send the log to standard error: coloured on a terminal, plain lines otherwise.

    Entry points and worker processes call it once; a second call replaces the first one's handler and touches no
    other. Chatty third-party loggers speak from WARNING on, unless the level is DEBUG.

    Args:
        level: name or number of the level; None reads ``LOG_LEVEL``.
        stream: where lines go; None means ``sys.stderr``.
    """
    number = resolve_level(level)
    target = sys.stderr if stream is None else stream
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if handler.get_name() == _MARK]:
        root.removeHandler(old)
    handler = _terminal_handler(target) if target.isatty() else _line_handler(target)
    handler.set_name(_MARK)
    root.addHandler(handler)
    root.setLevel(number)
    for name in _QUIET:
        logging.getLogger(name).setLevel(number if number <= logging.DEBUG else max(number, logging.WARNING))


def _line_handler(stream: TextIO) -> logging.Handler:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(_LINE))
    return handler


def _terminal_handler(stream: TextIO) -> logging.Handler:
    from rich.console import Console
    from rich.logging import RichHandler

    handler = RichHandler(
        console=Console(file=stream),
        show_path=False,
        rich_tracebacks=True,
        omit_repeated_times=False,
        markup=False,
    )
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler
