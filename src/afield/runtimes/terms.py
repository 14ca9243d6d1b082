"""The terms of a run: when it ends, when it is measured, how the server treats stale and absent clients."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from afield.core.errors import InputError, one_of, within


@dataclass(frozen=True)
class Stop:
    """When a run ends: the first bound that is reached."""

    updates: int | None = None
    versions: int | None = None
    time: float | None = None
    accuracy: float | None = None

    def __post_init__(self) -> None:
        bounds = (self.updates, self.versions, self.time)
        if all(bound is None for bound in bounds):
            raise InputError(
                "no end is set: give updates, versions or time (accuracy alone may never be reached)"
            )
        for name in ("updates", "versions", "time"):
            if getattr(self, name) is not None:
                within(name, getattr(self, name), 0, math.inf, above=True, below=True)
        if self.accuracy is not None:
            within("accuracy", self.accuracy, 0, 1, above=True)


@dataclass(frozen=True)
class Measuring:
    """When the model is evaluated, besides the start and the end."""

    versions: int | None = None  # every so many versions
    time: float | None = None  # every so much virtual time
    diagnose: bool = False  # also why the last step errs, and what each client weighs (runtimes/diagnose.py)

    def __post_init__(self) -> None:
        if self.versions is not None:
            within("versions", self.versions, 1, math.inf)
        if self.time is not None:
            within("time", self.time, 0, math.inf, above=True)


@dataclass(frozen=True)
class Manners:
    """How the server treats stale and absent clients."""

    max_staleness: int | None = None
    stale: str = "drop"  # an update past the bound is discarded on arrival; "restart": interrupted at once
    reply: str = "after"  # the next task starts from the model after or "before" the update was aggregated
    offline: str = "pause"  # a client that goes offline goes on later; "abort": its task is lost

    def __post_init__(self) -> None:
        one_of("stale", self.stale, ("drop", "restart"))
        one_of("reply", self.reply, ("after", "before"))
        one_of("offline", self.offline, ("pause", "abort"))
        if self.max_staleness is not None:
            within("max_staleness", self.max_staleness, 0, math.inf)


@dataclass(slots=True)
class Since:
    """Sums since the last measurement."""

    updates: int = 0
    staleness: int = 0
    losses: list[float] = field(default_factory=list)
