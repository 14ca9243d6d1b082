"""Leased models: one copy per version in flight, however many tasks start from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from afield.core.errors import InputError

SPARE = 4  # vectors kept for reuse: a fresh one of 11 M floats cost 14.5 ms, a fold 1.9


@dataclass(slots=True)
class Versions:
    """Reference-counted copies of handed-out versions; what nobody leases any more is recycled."""

    models: dict[int, Tensor] = field(default_factory=dict)
    leases: dict[int, int] = field(default_factory=dict)
    spare: list[Tensor] = field(default_factory=list)

    def lease(self, version: int, newest: int, write: Callable[[Tensor | None], Tensor]) -> Tensor:
        """The model of a version: the newest one is copied by `write` at its first lease."""
        if version not in self.models:
            if version != newest:
                held = ", ".join(str(v) for v in sorted(self.models)) or "none"
                raise InputError(f"version {version} is not held: the newest is {newest}, leased are {held}")
            self.models[version] = write(self.spare.pop() if self.spare else None)
            self.leases[version] = 0
        self.leases[version] += 1
        return self.models[version]

    def release(self, version: int) -> None:
        self.leases[version] -= 1
        if self.leases[version] == 0:
            del self.leases[version]
            vector = self.models.pop(version)
            if len(self.spare) < SPARE:
                self.spare.append(vector)
