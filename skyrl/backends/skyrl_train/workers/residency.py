"""Which models are on the GPU: a table by role, and the moves that a call needs. Decides, moves nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parts:
    """What of one role is on the training device."""

    model: bool = False
    """Parameters."""
    optimizer: bool = False
    """Optimizer state."""


@dataclass(frozen=True, slots=True)
class Move:
    """One transfer. Example: ``Move("ref", to_device=False, parts=Parts(model=True))`` offloads the reference."""

    role: str
    """Whose parts move."""
    to_device: bool
    """True loads, False offloads."""
    parts: Parts
    """Which parts move."""


class ResidencyTable:
    """Roles that share GPUs take turns on them.

    Args:
        groups: Role to the name of the set of GPUs it shares; a role that is absent never moves.
    """

    def __init__(self, groups: Mapping[str, str]) -> None:
        self._groups = dict(groups)
        self._resident: dict[str, Parts] = {}

    def resident(self, role: str) -> Parts:
        """What of the role is on the device."""
        return self._resident.get(role, Parts())

    def add_role(self, role: str, group: str) -> None:
        """Let a role share a group's GPUs; it starts offloaded."""
        self._groups[role] = group

    def mark(self, role: str, parts: Parts) -> None:
        """Record where a role's parts are now."""
        self._resident[role] = parts

    def mark_all_offloaded(self, roles: Iterable[str]) -> None:
        """Record that nothing of these roles is on the device."""
        for role in roles:
            self._resident[role] = Parts()

    def evict_others(self, role: str) -> list[Move]:
        """Moves that free the role's GPUs from every other role; the table then has them offloaded."""
        if role not in self._groups:
            return []
        moves = []
        for other, parts in self._resident.items():
            shares = other != role and self._groups.get(other) == self._groups[role]
            if shares and (parts.model or parts.optimizer):
                moves.append(Move(other, to_device=False, parts=parts))
                self._resident[other] = Parts()
        return moves

    def ensure(self, role: str, *, model: bool, optimizer: bool) -> list[Move]:
        """Moves, in order, after which the wanted parts are there and no other role of the group is."""
        if role not in self._groups:
            return []
        moves = self.evict_others(role)
        here = self.resident(role)
        missing = Parts(model=model and not here.model, optimizer=optimizer and not here.optimizer)
        if missing.model or missing.optimizer:
            moves.append(Move(role, to_device=True, parts=missing))
        self._resident[role] = Parts(model=here.model or model, optimizer=here.optimizer or optimizer)
        return moves

    def release(self, role: str, *, model: bool, optimizer: bool) -> list[Move]:
        """Moves after which these parts of the role are offloaded."""
        if role not in self._groups:
            return []
        here = self.resident(role)
        leaving = Parts(model=model and here.model, optimizer=optimizer and here.optimizer)
        self._resident[role] = Parts(model=here.model and not model, optimizer=here.optimizer and not optimizer)
        return [Move(role, to_device=False, parts=leaving)] if leaving.model or leaving.optimizer else []
