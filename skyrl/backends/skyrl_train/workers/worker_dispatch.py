"""Upstream's path to `WorkerDispatch`; home: `workers.dispatch`."""

from skyrl.backends.skyrl_train.workers.dispatch import WorkerDispatch

__all__ = ["WorkerDispatch"]
