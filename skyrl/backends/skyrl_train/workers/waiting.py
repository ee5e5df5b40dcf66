"""Wait for calls on a group of actors: bounded in time, and an error says which rank failed and where."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from skyrl.errors import DeadlineError, SkyRLError, WorkerError

TIMEOUT_KEY = "trainer.worker_timeout_s"


@dataclass(frozen=True, slots=True)
class Call:
    """One method on all ranks of a group."""

    role: str
    """For messages, for example ``policy``."""
    method: str
    """Name of the method."""
    refs: Sequence[Any]
    """One Ray ref per rank, in order of rank."""


def wait_for(call: Call, timeout_s: float) -> list[Any]:
    """Results by rank.

    Raises:
        DeadlineError: A rank took longer than ``timeout_s``.
        WorkerError: A rank died or failed; an error of this library that it raised comes back as itself.
    """
    ranks = {ref: rank for rank, ref in enumerate(call.refs)}
    pending, end = list(call.refs), time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, end - time.monotonic()))
        if not done:
            raise _deadline(call, sorted(ranks[ref] for ref in pending), timeout_s)
        try:
            results[ranks[done[0]]] = ray.get(done[0])
        except RayError as error:
            raise_worker_error(error, call, ranks[done[0]])
    return [results[rank] for rank in range(len(call.refs))]


async def wait_for_async(call: Call, timeout_s: float) -> list[Any]:
    """`wait_for` without blocking the event loop."""

    async def one(rank: int, ref: Any) -> Any:
        try:
            return await ref
        except RayError as error:
            raise_worker_error(error, call, rank)

    tasks = [asyncio.ensure_future(one(rank, ref)) for rank, ref in enumerate(call.refs)]
    try:
        return list(await asyncio.wait_for(asyncio.gather(*tasks), timeout_s))
    except TimeoutError:
        raise _deadline(call, [rank for rank, task in enumerate(tasks) if task.cancelled()], timeout_s) from None
    finally:
        for task in tasks:
            task.cancel()


def _deadline(call: Call, ranks: list[int], timeout_s: float) -> DeadlineError:
    return DeadlineError(
        "the controller",
        f"{call.method} of {call.role} rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}",
        timeout_s,
        TIMEOUT_KEY,
        "look for a stuck collective in the infra log under trainer.log_path, or raise the limit",
    )


def raise_worker_error(error: RayError, call: Call, rank: int) -> NoReturn:
    """Turn Ray's error into ours; a `SkyRLError` or a missing file that the worker raised keeps its type."""
    where = f"{call.role} worker rank {rank}"
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, SkyRLError | FileNotFoundError):
            cause.add_note(f"raised in {call.method} of {where}")
            raise cause from None
        text = f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
        raise WorkerError(f"{where} failed in {call.method}: {text}") from error
    if isinstance(error, RayActorError):
        reason = str(error).strip().splitlines()
        raise WorkerError(
            f"{where} died during {call.method}; its output is in the infra log under trainer.log_path, and a kill "
            f"by the system means too little memory ({reason[0] if reason else 'no reason given'})"
        ) from error
    raise WorkerError(f"{where} could not run {call.method}: {error}") from error
