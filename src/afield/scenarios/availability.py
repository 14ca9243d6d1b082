"""Who is online: a pure function of (seed, client, now).

`bind(scene)` gives it: (client, now) -> (online, until), where `until` is the instant at which the
answer changes: asked at `until`, it is the opposite, and asked any earlier, the same. `math.inf`: never.
"""

from __future__ import annotations

import bisect
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from afield.core.errors import InputError, within
from afield.core.keys import Stream, exponential, mix, stream_key, uniform
from afield.core.types import Scene
from afield.scenarios.delays import trace_rows

Presence = Callable[[int, float], tuple[bool, float]]


def _positive(name: str, value: float) -> None:
    within(name, value, 0, math.inf, above=True, below=True)


def _turns(online: bool, changes: array[float] | list[float], now: float) -> tuple[bool, float]:
    """The answer where the state was `online` at first and turns at each of the rising `changes`."""
    passed = bisect.bisect_right(changes, now)
    return online ^ bool(passed % 2), changes[passed] if passed < len(changes) else math.inf


def _alternating(begins: Callable[[int], bool], ends: Callable[[int, int, bool, float], float]) -> Presence:
    """On and off in turn; stretch `index`, begun at `start`, ends at `ends(client, index, online, start)`.

    The changes that were reached are kept per client (8 bytes each), so time that moves on costs O(1) a
    change once and O(log changes) an answer, and time that jumps back gets the same answers.
    """
    begun: dict[int, bool] = {}
    changes: dict[int, array[float]] = {}

    def presence(client: int, now: float) -> tuple[bool, float]:
        if not now < math.inf:
            raise InputError(f"now = {now} is not an instant; ask at a finite time")
        if client not in begun:
            begun[client], changes[client] = begins(client), array("d")
        first, known = begun[client], changes[client]
        while not known or known[-1] <= now:
            start, index = known[-1] if known else 0.0, len(known)
            end = ends(client, index, first ^ bool(index % 2), start)
            known.append(max(end, math.nextafter(start, math.inf)))  # time moves on, whatever the rounding
        return _turns(first, known, now)

    return presence


@dataclass(frozen=True)
class Always:
    """Everyone is online all the time."""

    def bind(self, scene: Scene) -> Presence:
        return lambda client, now: (True, math.inf)


@dataclass(frozen=True)
class Bernoulli:
    """Time is cut into slots; a client is online in each with probability p, independently.

    Runs of equal slots are drawn as such (their lengths are geometric, which is the same law), so that
    `until` is exact however close p is to 0 or 1.
    """

    p: float = 0.5
    period: float = 1.0

    def __post_init__(self) -> None:
        within("p", self.p, 0, 1)
        _positive("period", self.period)

    def bind(self, scene: Scene) -> Presence:
        if self.p in (0.0, 1.0):
            return lambda client, now: (self.p == 1.0, math.inf)
        key = stream_key(scene.seed, Stream.PRESENCE)

        def ends(client: int, index: int, online: bool, start: float) -> float:
            leave = -math.log(self.p) if online else -math.log1p(-self.p)
            slots = 1 + int(min(exponential(client, index + 1, after=key) / leave, 2.0**52))
            return (round(start / self.period) + slots) * self.period

        return _alternating(lambda client: uniform(client, 0, after=key) < self.p, ends)


@dataclass(frozen=True)
class OnOff:
    """Online and offline in turn, for exponential times with these means (a Markov chain, in equilibrium)."""

    on: float = 10.0
    off: float = 5.0

    def __post_init__(self) -> None:
        _positive("on", self.on)
        _positive("off", self.off)

    def bind(self, scene: Scene) -> Presence:
        key, share = stream_key(scene.seed, Stream.PRESENCE), self.on / (self.on + self.off)

        def ends(client: int, index: int, online: bool, start: float) -> float:
            return start + (self.on if online else self.off) * exponential(client, index + 1, after=key)

        return _alternating(lambda client: uniform(client, 0, after=key) < share, ends)


@dataclass(frozen=True)
class Diurnal:
    """Online for some hours a day, at a time of day of the client's own.

    `spread`: the share of the day over which the clients' windows begin (0: all at once; 1: all around
    the clock). `day` and `hours` are in the unit of the run's clock.
    """

    day: float = 24.0
    hours: float = 8.0
    spread: float = 1.0

    def __post_init__(self) -> None:
        _positive("day", self.day)
        within("hours", self.hours, 0, self.day, above=True)
        within("spread", self.spread, 0, 1)

    def bind(self, scene: Scene) -> Presence:
        if self.hours == self.day:
            return Always().bind(scene)
        key = stream_key(scene.seed, Stream.PRESENCE)

        def presence(client: int, now: float) -> tuple[bool, float]:
            phase = self.spread * self.day * uniform(client, after=key)
            day = math.floor((now - phase) / self.day)
            # The division may round across a window's begin; the begins that we answer with decide.
            day += (phase + (day + 1) * self.day <= now) - (phase + day * self.day > now)
            close = phase + day * self.day + self.hours
            return (True, close) if now < close else (False, phase + (day + 1) * self.day)

        return presence


@dataclass(frozen=True)
class Dropout:
    """A share of the clients leaves at one instant, for good or until they come back.

    Exactly round(share * N) clients.
    """

    share: float = 0.5
    at: float = 100.0
    back: float | None = None

    def __post_init__(self) -> None:
        within("share", self.share, 0, 1)
        within("at", self.at, 0, math.inf, below=True)
        if self.back is not None:
            within("back", self.back, self.at, math.inf, above=True, below=True)

    def bind(self, scene: Scene) -> Presence:
        key = stream_key(scene.seed, Stream.PRESENCE)
        order = sorted(range(scene.clients), key=lambda client: mix(client, after=key))
        leavers = frozenset(order[: round(self.share * scene.clients)])
        changes = [self.at] if self.back is None else [self.at, self.back]
        return lambda client, now: _turns(True, changes if client in leavers else [], now)


@dataclass(frozen=True)
class Trace:
    """Measured presence: a CSV file with the columns client,on,off; online from `on` until before `off`.

    Rows in any order; those of one client may touch or overlap. A client without rows is never online. `off`
    may be inf.
    """

    file: str = ""

    def bind(self, scene: Scene) -> Presence:
        stretches: list[list[tuple[float, float]]] = [[] for _ in range(scene.clients)]
        for line, client, (on, off) in trace_rows(self.file, ("on", "off"), scene.clients):
            if not (-math.inf < on < off):
                raise InputError(
                    f"{self.file}, line {line}: on {on} and off {off}; on must be finite and before off"
                )
            stretches[client].append((on, off))
        changes = [_joined(own) for own in stretches]
        return lambda client, now: _turns(False, changes[client], now)


def _joined(stretches: list[tuple[float, float]]) -> list[float]:
    """The changes of state, where stretches may touch or overlap: `until` must be a real change."""
    changes: list[float] = []
    for on, off in sorted(stretches):
        if changes and on <= changes[-1]:
            changes[-1] = max(changes[-1], off)
        else:
            changes += (on, off)
    return changes


AVAILABILITIES = {
    "always": Always,
    "bernoulli": Bernoulli,
    "on-off": OnOff,
    "diurnal": Diurnal,
    "dropout": Dropout,
    "trace": Trace,
}
