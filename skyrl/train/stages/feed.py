"""The prompts of a run: batches of the data loader, pass after pass, and where in the data the run stands.

A training step takes one batch, or several with dynamic sampling. So epochs follow the loader, not the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from skyrl.errors import DatasetError

Prompts = list[dict[str, Any]]


class PromptFeed:
    """Draws batches until `passes` passes over the data are over.

    Args:
        loader: Returns the data loader, with `state_dict` and `load_state_dict`; None when the run has no data.
        passes: `trainer.epochs`.
        on_epoch_start: Called before the first batch of a pass.
        on_epoch_end: Called when a pass is used up, or the run ends inside it.
    """

    def __init__(
        self,
        loader: Callable[[], Any],
        *,
        passes: int,
        on_epoch_start: Callable[[], None],
        on_epoch_end: Callable[[], None],
    ) -> None:
        self._loader = loader
        self._passes = passes
        self._on_epoch_start = on_epoch_start
        self._on_epoch_end = on_epoch_end
        self._batches: Iterator[Prompts] | None = None
        self._in_epoch = self._drew = False
        self._step_start = 0
        self._place: dict[str, Any] | None = None
        self._abandoned = False
        self.drawn = 0
        """Batches taken since the beginning of the run."""

    @property
    def batches_per_pass(self) -> int:
        """Batches of one pass."""
        loader = self._loader()
        return 0 if loader is None else len(loader)

    @property
    def epoch(self) -> int:
        """Pass of the last batch, from 0."""
        return max(0, self.drawn - 1) // max(1, self.batches_per_pass)

    @property
    def next_epoch(self) -> int:
        """Pass of the next batch."""
        return self.drawn // max(1, self.batches_per_pass)

    @property
    def is_used_up(self) -> bool:
        """No batch is left."""
        return self.drawn >= self._passes * self.batches_per_pass

    @property
    def step_ends_epoch(self) -> bool:
        """The step in work took the last batch of a pass."""
        size = max(1, self.batches_per_pass)
        return self.drawn // size > self._step_start // size

    def begin_step(self, *, may_be_abandoned: bool) -> None:
        """Remember the place from which a step starts; to go back to it later costs the loader's state now."""
        self._step_start = self.drawn
        self._place = self._loader().state_dict() if may_be_abandoned else None

    def abandon_step(self) -> None:
        """Count the batches of the step in work as not taken, here and in `state`. Nothing is drawn afterwards."""
        self._abandoned, self.drawn = True, self._step_start

    def draw(self) -> Prompts | None:
        """Return the next batch, or None when all passes are over.

        Raises:
            DatasetError: The data loader gives nothing.
        """
        empty_passes = 0
        while not (self.is_used_up or self._abandoned):
            batch = next(self._open(), None)
            if batch is not None:
                self.drawn, self._drew = self.drawn + 1, True
                return batch
            # A loader that was saved after a pass's last batch ends that pass first, without a batch.
            empty_passes += not self._drew
            if empty_passes > 1:
                raise DatasetError("data.train_data: the data loader gives no batch; see trainer.train_batch_size")
            self._batches = None
            self.close()
        return None

    def close(self) -> None:
        """Tell that the pass in work is over."""
        if self._in_epoch and self._drew:
            self._in_epoch = self._drew = False
            self._on_epoch_end()

    def state(self) -> dict[str, Any] | None:
        """Return the loader's state after the last step that was not abandoned."""
        loader = self._loader()
        if loader is None:
            return None
        state: dict[str, Any] | None = self._place if self._abandoned else loader.state_dict()
        return state

    def resume(self, drawn: int, state: dict[str, Any] | None) -> None:
        """Go on after `drawn` batches; without the loader's state its pass starts again."""
        if state is not None and self._loader() is not None:
            self._loader().load_state_dict(state)
            self.drawn = drawn
        else:
            size = max(1, self.batches_per_pass)
            self.drawn = drawn // size * size
        self._step_start = self.drawn

    def _open(self) -> Iterator[Prompts]:
        if self._batches is None:
            if not self._in_epoch:
                self._in_epoch = True
                self._on_epoch_start()
            self._batches = iter(self._loader())
        return self._batches
