"""Runs the rollouts of a batch at the same time, and decides what happens to those that fail."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

from skyrl.errors import ConfigError, DeadlineError, EngineDiedError, RolloutError
from skyrl.train.generators.agent_loop import Episode
from skyrl.train.generators.start_gate import StartGate
from skyrl.train.generators.trajectory import TrajectoryOutput
from skyrl.train.utils.rate_limiter import NoOpRateLimiter
from skyrl.types.rollout import Failure

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """What a failed try leads to."""

    max_attempts: int
    """Tries per rollout."""
    on_error: Literal["mask", "raise"]
    """`mask` records a rollout that failed at every try; `raise` ends the batch."""
    max_failed_fraction: float
    """Share of failed rollouts above which the batch ends."""
    timeout_s: float
    """Seconds for one rollout, all its tries included."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigError(f"generator.max_attempts={self.max_attempts} must be at least 1")
        if self.on_error not in ("mask", "raise"):
            raise ConfigError(f"generator.on_error={self.on_error!r} must be 'mask' or 'raise'")
        if not 0 <= self.max_failed_fraction <= 1:
            raise ConfigError(f"generator.max_failed_fraction={self.max_failed_fraction} must be between 0 and 1")
        if not self.timeout_s > 0:
            raise ConfigError(f"generator.trajectory_timeout_s={self.timeout_s} must be greater than 0")


@dataclass(kw_only=True)
class RolloutContext:
    """Which try of which rollout of the batch this is."""

    index: int = 0
    """Row of the batch."""
    attempt: int = 1
    """From 1."""
    global_step: int | None = None
    """Part of the sampling seed."""
    cache_salt: str | None = None
    """Shared by the batch."""
    gate: StartGate | None = None
    """Set in the deterministic mode."""
    episode: Episode = field(default_factory=Episode)
    """Filled while the try runs."""


RunTry = Callable[[RolloutContext], Coroutine[Any, Any, TrajectoryOutput]]
"""Runs one try; raises when it fails."""

MakeFailed = Callable[[RolloutContext, Failure, str], TrajectoryOutput]
"""Makes the row of a failed rollout from its last try, the cause and the stop reason."""


class Collector:
    """Collects one batch.

    Args:
        policy: What failures lead to.
        limiter: Decides when a rollout may start.
        run_try: Runs one try.
        make_failed: Makes the row of a rollout that failed.
        on_done: Called after each rollout, for progress.
    """

    def __init__(
        self,
        policy: FailurePolicy,
        limiter: NoOpRateLimiter,
        *,
        run_try: RunTry,
        make_failed: MakeFailed,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._policy = policy
        self._limiter = limiter
        self._run_try = run_try
        self._make_failed = make_failed
        self._on_done = on_done
        self._causes: Counter[str] = Counter()
        self._total = 0

    async def collect(
        self, new_context: Callable[[int, int], RolloutContext], num_rollouts: int, gate: StartGate | None = None
    ) -> list[TrajectoryOutput]:
        """Run every rollout; rows follow the batch.

        Args:
            new_context: Makes the context of (row, attempt).
            num_rollouts: Rows of the batch.
            gate: Holds the engine until the batch is queued.

        Raises:
            RolloutError: Too many rollouts failed, or one did and the policy says `raise`.
            EngineDiedError: An inference server of this run died, whatever the policy says.

        The other rollouts are cancelled and cleaned up before either is raised.
        """
        self._total = num_rollouts
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._rollout(new_context, row, gate)) for row in range(num_rollouts)]
                if gate is not None:
                    group.create_task(gate.run())
        except BaseExceptionGroup as errors:
            failure = _first(errors)
        if failure is not None:  # outside the handler, so that its own cause stays
            raise failure
        return [task.result() for task in tasks]

    async def _rollout(
        self, new_context: Callable[[int, int], RolloutContext], row: int, gate: StartGate | None
    ) -> TrajectoryOutput:
        async with self._limiter:
            try:
                output = await self._tries(new_context, row)
            finally:
                if gate is not None:
                    gate.gave_up()
        self._on_done()
        return output

    async def _tries(self, new_context: Callable[[int, int], RolloutContext], row: int) -> TrajectoryOutput:
        limit = asyncio.timeout(self._policy.timeout_s)
        context = new_context(row, 1)
        error: Exception | None = None
        try:
            async with limit:
                for attempt in range(1, self._policy.max_attempts + 1):
                    context = new_context(row, attempt)
                    try:
                        return await self._run_try(context)
                    except (ConfigError, EngineDiedError):
                        raise  # no other try or rollout can do better
                    except Exception as cause:  # noqa: BLE001 - whatever breaks a rollout becomes its record
                        error = cause
                        self._log(context, cause)
        except TimeoutError:
            if not limit.expired():
                raise
            error = DeadlineError(
                waiter="the generator",
                awaited=f"rollout {row} (in {context.episode.where})",
                seconds=self._policy.timeout_s,
                key="generator.trajectory_timeout_s",
            )
            self._log(context, error)
        assert error is not None
        return self._failed(context, error)

    def _failed(self, context: RolloutContext, error: Exception) -> TrajectoryOutput:
        where = context.episode.where
        if self._policy.on_error == "raise":
            raise RolloutError(
                f"rollout {context.index} failed in {where} at try {context.attempt}: {_describe(error)}; "
                "generator.on_error=mask records such rollouts and goes on"
            ) from error
        self._causes[f"{where}: {_describe(error)}"] += 1
        num_failed = sum(self._causes.values())
        if num_failed > self._policy.max_failed_fraction * self._total:
            causes = "; ".join(f"{count} x {cause}" for cause, count in self._causes.most_common(5))
            raise RolloutError(
                f"{num_failed} of {self._total} rollouts failed, more than generator.max_failed_fraction="
                f"{self._policy.max_failed_fraction:g} allows: {causes}"
            ) from error
        failure = Failure(type=type(error).__name__, message=str(error), where=where)
        return self._make_failed(context, failure, "timeout" if isinstance(error, DeadlineError) else "error")

    def _log(self, context: RolloutContext, error: Exception) -> None:
        """Log the first failure of a batch with its traceback, the others in one line."""
        first = not self._causes
        logger.warning(
            "rollout %d, try %d of %d, failed in %s: %s",
            context.index,
            context.attempt,
            self._policy.max_attempts,
            context.episode.where,
            _describe(error),
            exc_info=error if first else None,
        )


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The death of a server where there is one, for other failures follow from it; else the first error."""
    deaths = errors.subgroup(EngineDiedError)
    error: BaseException = errors if deaths is None else deaths
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
