"""What a run tells of itself, besides receipts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Measurement:
    """The model at one moment."""

    time: float
    wall: float
    version: int
    updates: int
    steps: int  # local steps of those updates
    bytes: int
    staleness: float | None  # mean over the updates since the last measurement
    train_loss: float | None  # likewise
    values: Mapping[str, Any]
    clients: Mapping[str, list[Any]] | None = None  # the same of each client, where the run is diagnosed

    def row(self) -> dict[str, Any]:
        row = {name: getattr(self, name) for name in self.__slots__ if name not in ("values", "clients")}
        return {**row, **self.values}
