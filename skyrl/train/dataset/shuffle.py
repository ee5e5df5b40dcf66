"""A shuffled order that depends on seed and epoch alone.

The order of an epoch is a permutation drawn from (seed, epoch). So it is the same however many processes load, and
whether the run was resumed or not; a generator that is drawn from as one goes along gives neither.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from skyrl.utils.seeds import derive_seed


class EpochShuffle(Sampler[int]):
    """Indices in the order of the next epoch, each time it is iterated.

    Args:
        num_rows: Rows of the data set.
        seed: `trainer.seed`.
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows = num_rows
        self.seed = seed
        self.next_epoch = 0

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        return EpochOrder(self)

    def order(self, epoch: int) -> list[int]:
        """Return the permutation of an epoch."""
        generator = torch.Generator()
        generator.manual_seed(derive_seed(self.seed, "shuffle", epoch))
        return list(torch.randperm(self.num_rows, generator=generator).tolist())


class EpochOrder(Iterator[int]):
    """One pass. It claims its epoch when its first index is asked for: the loader makes passes that it never uses."""

    def __init__(self, sampler: EpochShuffle) -> None:
        self._sampler = sampler
        self._epoch: int | None = None
        self._order: list[int] = []
        self._position = 0

    def __iter__(self) -> EpochOrder:
        return self

    def __next__(self) -> int:
        if self._epoch is None:
            self._claim(self._sampler.next_epoch)
        if self._position >= len(self._order):
            raise StopIteration
        self._position += 1
        return self._order[self._position - 1]

    def state_dict(self) -> dict[str, int]:
        """Return epoch and position."""
        epoch = self._sampler.next_epoch if self._epoch is None else self._epoch
        return {"epoch": epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state_dict` was taken; the sampler's later passes follow."""
        self._claim(state["epoch"])
        self._position = state["position"]

    def _claim(self, epoch: int) -> None:
        self._epoch = epoch
        self._sampler.next_epoch = epoch + 1
        self._order = self._sampler.order(epoch)
