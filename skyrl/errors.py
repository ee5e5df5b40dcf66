"""Every error that a user of the library can meet, by what went wrong.

A message names the key or the part, the value, the need and a way out.
"""

from __future__ import annotations


class SkyRLError(Exception):
    """Base of the library's own errors."""


class ConfigError(SkyRLError, ValueError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class DatasetError(SkyRLError, ValueError):
    """A data file is missing, or a row lacks what training needs."""


class ResourceError(SkyRLError, RuntimeError):
    """The cluster has fewer GPUs, CPUs or ports than the run asks for."""


class ModelLoadError(SkyRLError, ValueError):
    """A model path does not exist or does not hold a usable checkpoint."""


class InferenceError(SkyRLError, RuntimeError):
    """An inference server refused a request, answered nonsense or died."""


class EngineDiedError(InferenceError):
    """A server that this run started is dead; no rollout can go on, so the run ends."""


class RolloutError(SkyRLError, RuntimeError):
    """More rollouts of a batch failed than the run allows, or rollouts contradict each other."""


class DynamicSamplingError(SkyRLError, RuntimeError):
    """Dynamic sampling found too few groups that teach something."""


class WeightSyncError(SkyRLError, RuntimeError):
    """Weights did not reach the engines; generation stays paused."""


class WeightProofError(WeightSyncError):
    """The engine holds other weights than the trainer; names the tensors."""


class WorkerError(SkyRLError, RuntimeError):
    """A training worker failed or died."""


class CheckpointError(SkyRLError, RuntimeError):
    """A checkpoint could not be written or read."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """The checkpoint to resume from does not exist."""


class DeadlineError(SkyRLError, TimeoutError):
    """A wait ran out of time.

    The text says who waited for whom, how long, which key bounds the wait and what to try.
    """

    def __init__(self, waiter: str, awaited: str, seconds: float, key: str, hint: str = "") -> None:
        self.waiter, self.awaited, self.seconds, self.key, self.hint = waiter, awaited, seconds, key, hint
        advice = f"; {hint}" if hint else ""
        super().__init__(f"{waiter} waited {seconds:g} s for {awaited} ({key}={seconds:g}){advice}")

    def __reduce__(self) -> tuple[type[DeadlineError], tuple[str, str, float, str, str]]:
        return type(self), (self.waiter, self.awaited, self.seconds, self.key, self.hint)
