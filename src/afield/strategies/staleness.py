"""Staleness functions (Xie et al. 2019, section 5.2): what an update of a given staleness weighs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from afield.core.errors import within


class Staleness(Protocol):
    """A weight in (0, 1], 1 for a fresh update."""

    def __call__(self, staleness: int) -> float: ...


@dataclass(frozen=True)
class Constant:
    """1, however stale."""

    def __call__(self, staleness: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Linear:
    """1 / (a s + 1)."""

    a: float = 0.5

    def __post_init__(self) -> None:
        within("a", self.a, 0, math.inf)

    def __call__(self, staleness: int) -> float:
        return 1.0 / (self.a * staleness + 1.0)


@dataclass(frozen=True)
class Polynomial:
    """(s + 1)^-a."""

    a: float = 0.5

    def __post_init__(self) -> None:
        within("a", self.a, 0, math.inf)

    def __call__(self, staleness: int) -> float:
        return float((staleness + 1.0) ** -self.a)


@dataclass(frozen=True)
class Exponential:
    """e^(-a s)."""

    a: float = 0.5

    def __post_init__(self) -> None:
        within("a", self.a, 0, math.inf)

    def __call__(self, staleness: int) -> float:
        return math.exp(-self.a * staleness)


@dataclass(frozen=True)
class Hinge:
    """1 up to b, then 1 / (a (s - b) + 1)."""

    a: float = 10.0
    b: float = 4.0

    def __post_init__(self) -> None:
        within("a", self.a, 0, math.inf)
        within("b", self.b, 0, math.inf)

    def __call__(self, staleness: int) -> float:
        return 1.0 if staleness <= self.b else 1.0 / (self.a * (staleness - self.b) + 1.0)


STALENESS = {
    "constant": Constant,
    "linear": Linear,
    "polynomial": Polynomial,
    "exponential": Exponential,
    "hinge": Hinge,
}
