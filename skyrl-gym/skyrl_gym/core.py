"""The environment contract."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Generic, Self, TypedDict, TypeVar

ObsType = TypeVar("ObsType")
ActType = TypeVar("ActType")


class EnvStepOutput(TypedDict, total=False):
    """What a step returns; a plain dict at run time."""

    observations: Any
    """What the agent sees next."""
    reward: Any
    """Anything that `float()` takes."""
    done: bool
    """True ends the episode."""
    metadata: dict[str, Any] | None
    """For people and logs; no part of the loop reads it."""


class Env(Generic[ObsType, ActType]):
    """One episode of a task.

    A caller makes the environment, calls `init` once, `step` until it says `done`, and `close` at the end,
    whatever happened before. Different instances may run in different threads at the same time; one instance
    is never entered twice at once. An environment may define `init`, `step` and `close` as coroutine functions
    instead; the caller then awaits them.
    """

    spec: Any = None
    """Set by `skyrl_gym.make`: the `EnvSpec` of the environment with the keyword arguments that were used."""

    def init(self, *args: Any) -> tuple[ObsType, dict[str, Any]]:
        """Start the episode.

        Returns:
            The first observation and a dict of information.
        """
        raise NotImplementedError(f"{type(self).__name__} must define init()")

    def step(self, action: ActType) -> Any:
        """Apply one action. Given the same actions an environment must answer the same.

        Returns:
            An `EnvStepOutput`, or a dict with more keys.
        """
        raise NotImplementedError(f"{type(self).__name__} must define step()")

    def close(self) -> None:
        """Release what the episode holds. May be called more than once."""
        return None

    def __str__(self) -> str:
        return f"Env({type(self).__name__})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
