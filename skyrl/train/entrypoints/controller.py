"""The controller: one Ray task that owns a run, started and watched from the command line's process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skyrl.errors import SkyRLError
from skyrl.train.utils.progress import terminal_progress
from skyrl.utils.log import configure_logging

if TYPE_CHECKING:
    from ray import ObjectRef

    from skyrl.config.root import SkyRLTrainConfig

logger = logging.getLogger(__name__)

_TASK = {"name": "controller", "num_cpus": 1, "max_retries": 0}

TEARDOWN_S = 60.0
"""Seconds that an interrupted controller has to stop its servers and workers before it is killed."""


def run_controller(main_fn: Callable[[Any], Any], config: SkyRLTrainConfig, *, trains: bool = True) -> float | None:
    """Start Ray, run ``main_fn`` in a task with one CPU, and shut Ray down whatever happens.

    Ctrl-C cancels the task, which gets `TEARDOWN_S` for its own clean-up; a second Ctrl-C kills it at once.

    Args:
        main_fn: A function of the config, or a class with a method `run`.
        config: The run.
        trains: Whether it needs GPUs for training roles, besides those of the engines.

    Returns:
        The number that ``main_fn`` returned, for sweepers; None if it was none.
    """
    import ray

    from skyrl.backends.skyrl_train.cluster import initialize_ray

    with terminal_progress():
        try:
            initialize_ray(config, trains=trains)
            result = _wait(ray.remote(call_main).options(**_TASK).remote(main_fn, config))
        finally:
            ray.shutdown()
    return float(result) if isinstance(result, int | float) and not isinstance(result, bool) else None


def call_main(main_fn: Callable[[Any], Any], config: SkyRLTrainConfig) -> Any:
    """Run ``main_fn(config)``, or ``main_fn(config).run()`` for a class; called inside the task.

    Its log lines reach the terminal through Ray.
    """
    configure_logging()
    return main_fn(config).run() if isinstance(main_fn, type) else main_fn(config)


def _wait(task: ObjectRef[Any]) -> Any:
    """Return the task's result; raise the library's own errors as they are, without Ray's wrapping."""
    import ray
    from ray.exceptions import RayTaskError

    try:
        return ray.get(task)
    except RayTaskError as error:
        if isinstance(error.cause, SkyRLError):
            raise error.cause from error
        raise
    except (KeyboardInterrupt, SystemExit):
        _cancel(task)
        raise


def _cancel(task: ObjectRef[Any]) -> None:
    import ray

    logger.warning("Interrupted: stopping servers and workers (at most %.0f s; Ctrl-C again kills them)", TEARDOWN_S)
    try:
        ray.cancel(task)
        done, _ = ray.wait([task], timeout=TEARDOWN_S)
    except KeyboardInterrupt:
        done = []
    if not done:
        logger.warning("The controller did not stop in time: killed")
        ray.cancel(task, force=True)
