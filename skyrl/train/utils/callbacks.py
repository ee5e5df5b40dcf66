"""Hooks that user code adds to a trainer, and the flags through which it steers.

Order in one step: ``on_step_start``, training, ``on_step_end``, then save (``on_save``), weight sync, evaluation
(``on_eval_start``, ``on_eval_end``), ``on_log``. Callbacks run in the order of registration, in the controller; an
exception in one ends the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

EVENTS = (
    "on_train_start",
    "on_train_end",
    "on_epoch_start",
    "on_epoch_end",
    "on_step_start",
    "on_step_end",
    "on_eval_start",
    "on_eval_end",
    "on_save",
    "on_log",
)


@dataclass(kw_only=True)
class CallbackInput:
    """Where the run stands, and what the event is about."""

    global_step: int
    """The step in work, from 1; 0 before the first."""
    epoch: int
    """Epoch of that step, from 0."""
    total_steps: int | None
    """Steps of the whole run, with dynamic sampling at most; None when the data comes from outside."""
    steps_per_epoch: int
    """Batches of one epoch: its steps, unless dynamic sampling takes several batches for one."""
    batch: TrainingInputBatch | None = None
    """``on_step_end``: what was trained on."""
    metrics: dict[str, Any] | None = None
    """``on_step_end``: metrics of the policy update; ``on_eval_end``: of the evaluation."""
    logs: dict[str, Any] | None = None
    """``on_log``: what the tracker gets next; change it in place."""
    ckpt_path: str | None = None
    """``on_save``: the checkpoint just written."""


@dataclass
class TrainingControl:
    """Requests of callbacks. The trainer takes them once a step, right after ``on_step_end``."""

    should_save: bool = False
    """Write a checkpoint in this step, whatever the interval says."""
    should_evaluate: bool = False
    """Evaluate in this step, whatever the interval says; needs an evaluation data set."""
    should_stop: bool = False
    """Finish after this step, with the final save."""

    def take(self) -> TrainingControl:
        """Return the requests made so far and clear them; ``should_stop`` stays set."""
        taken = replace(self)
        self.should_save = self.should_evaluate = False
        return taken


class TrainingCallback:
    """Base of all callbacks; every hook does nothing.

    ``trainer`` is the running trainer, ``callback_input`` says where it stands, ``control`` takes requests. Flags set
    after ``on_step_end`` act in the next step.
    """

    def on_train_start(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        """Models are built, a checkpoint is loaded and the engines hold the weights."""

    def on_train_end(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        """Training is over, also when it raised."""

    def on_epoch_start(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        """The data set starts again; see `on_epoch_end`."""

    def on_epoch_end(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        """The data set is used up; with dynamic sampling this may happen inside a step."""

    def on_step_start(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        """Before generation.

        When the data ends before dynamic sampling has a full batch, the step is left out: it has no other event.
        """

    def on_step_end(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        """After the update of the policy, before save, weight sync and evaluation."""

    def on_eval_start(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        """Before an evaluation."""

    def on_eval_end(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        """After an evaluation."""

    def on_save(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        """A checkpoint is complete."""

    def on_log(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        """The metrics of a step are about to reach the tracker."""


class CallbackHandler:
    """Calls every callback for an event, in the order of registration."""

    def __init__(self, callbacks: Iterable[TrainingCallback] | None = None) -> None:
        self.callbacks: list[TrainingCallback] = []
        for callback in callbacks or ():
            self.add(callback)

    def add(self, callback: TrainingCallback) -> None:
        """Register one more callback, after those there are.

        Raises:
            TypeError: It is no `TrainingCallback` instance (often the class instead of an object).
        """
        if not isinstance(callback, TrainingCallback):
            raise TypeError(f"a callback must be an instance of TrainingCallback, not {callback!r}")
        self.callbacks.append(callback)

    def call(self, event: str, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        """Call ``event`` on every callback; the first exception propagates.

        Raises:
            ValueError: There is no such event.
        """
        if event not in EVENTS:
            raise ValueError(f"unknown event {event!r}; there are {', '.join(EVENTS)}")
        for callback in self.callbacks:
            hook = getattr(callback, event)
            hook(trainer, callback_input, control)
