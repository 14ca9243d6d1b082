"""Who trains when: schedulers for updates used as they arrive, and participants of synchronous rounds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from afield.core.errors import InputError, within
from afield.core.keys import Stream, exponential, mix, uniform
from afield.core.types import Scene


@dataclass(slots=True)
class Lottery:
    """Keeps `limit` clients running; the next one is uniform among the idle."""

    seed: int
    limit: int
    idle: list[int] = field(default_factory=list)
    draws: int = 0
    holds: bool = False
    key: int = field(init=False)

    def __post_init__(self) -> None:
        self.key = mix(self.seed, Stream.PICK)

    def ready(self, client: int) -> None:
        self.idle.append(client)

    def pick(self, running: int) -> int | None:
        if running >= self.limit or not self.idle:
            return None
        index = int(uniform(self.draws, after=self.key) * len(self.idle))
        self.draws += 1
        # order is free in a lottery, so the last one fills the gap: O(1) at a million clients
        self.idle[index], self.idle[-1] = self.idle[-1], self.idle[index]
        return self.idle.pop()

    def rest(self, client: int, count: int) -> float:
        return 0.0


@dataclass(slots=True)
class Queue:
    """Clients start in the order in which they became idle, after a pause where there is one."""

    seed: int
    limit: float = math.inf
    pause: float = 0.0
    holds: bool = False
    idle: deque[int] = field(default_factory=deque)

    def ready(self, client: int) -> None:
        self.idle.append(client)

    def pick(self, running: int) -> int | None:
        return self.idle.popleft() if self.idle and running < self.limit else None

    def rest(self, client: int, count: int) -> float:
        return self.pause * exponential(self.seed, client, count, Stream.PAUSE) if self.pause else 0.0


@dataclass(frozen=True)
class Concurrency:
    """Keep `limit` clients busy; the next one is drawn uniformly among the idle."""

    limit: int = 10

    def __post_init__(self) -> None:
        within("limit", self.limit, 1, math.inf)

    def concurrency(self, clients: int) -> int:
        return min(self.limit, clients)

    def bind(self, scene: Scene) -> Lottery:
        if self.limit > scene.clients:
            raise InputError(
                f"scheduler.limit = {self.limit} is above the {scene.clients} clients there are: lower it"
            )
        return Lottery(scene.seed, self.limit)


@dataclass(frozen=True)
class All:
    """Everyone always busy; who is told to hold waits for the next version."""

    def concurrency(self, clients: int) -> int:
        return clients

    def bind(self, scene: Scene) -> Queue:
        return Queue(scene.seed, holds=True)


@dataclass(frozen=True)
class CheckIn:
    """Clients come back after a random pause of mean `pause` (FedAsync's randomised check-in)."""

    pause: float = 1.0
    limit: int | None = None

    def __post_init__(self) -> None:
        within("pause", self.pause, 0, math.inf, above=True)
        if self.limit is not None:
            within("limit", self.limit, 1, math.inf)

    def concurrency(self, clients: int) -> int:
        return clients if self.limit is None else min(self.limit, clients)

    def bind(self, scene: Scene) -> Queue:
        return Queue(scene.seed, limit=math.inf if self.limit is None else self.limit, pause=self.pause)


@dataclass(frozen=True)
class SampledStaleness:
    """One uniform client per version, from a version of staleness uniform in 0 .. min(version, max).

    FedAsync's experiments; for strategies that step at every arrival. Time is counted in versions.
    """

    max: int = 4

    def __post_init__(self) -> None:
        within("max", self.max, 0, math.inf)

    def concurrency(self, clients: int) -> int:
        return 1

    def draw(self, scene: Scene, version: int) -> tuple[int, int]:
        """Client and staleness of the update that arrives at this version: known ahead, so blocks can be trained."""
        client = int(uniform(scene.seed, Stream.PICK, version) * scene.clients)
        staleness = int(uniform(scene.seed, Stream.STALENESS, version) * (min(version, self.max) + 1))
        return client, staleness


@dataclass(frozen=True)
class Ticks:
    """Delays counted in server iterations: every due update is received, then one step (`per = "tick"`).

    Without a `limit` everyone is always busy, and who is told to hold waits for the next version (as in `all`).
    """

    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None:
            within("limit", self.limit, 1, math.inf)

    def concurrency(self, clients: int) -> int:
        return clients if self.limit is None else min(self.limit, clients)

    def bind(self, scene: Scene) -> Lottery | Queue:
        return Queue(scene.seed, holds=True) if self.limit is None else Lottery(scene.seed, self.limit)


@dataclass(frozen=True)
class Bernoulli:
    """Rounds in which client i takes part with probability p_i (one value, or one per equal block of clients)."""

    p: float | tuple[float, ...] = 0.5
    deadline: float | None = None
    idle: float = 1.0  # how long a round without participants lasts

    def __post_init__(self) -> None:
        if self.p == ():
            raise InputError("p is empty: give 1 value, or one per equal block of clients")
        for value in self.p if isinstance(self.p, tuple) else (self.p,):
            within("p", value, 0, 1, above=True)
        _check_round(self.deadline, self.idle)

    def concurrency(self, clients: int) -> int:
        return max(1, round(sum(self.participation(clients))))

    def participation(self, clients: int) -> tuple[float, ...]:
        if not isinstance(self.p, tuple):
            return (self.p,) * clients
        if clients % len(self.p):
            raise InputError(
                f"rounds.p has {len(self.p)} values, which do not divide {clients} clients into equal blocks: "
                f"give 1 value, or a number of them that divides {clients}"
            )
        return tuple(value for value in self.p for _ in range(clients // len(self.p)))

    def participants(self, scene: Scene, number: int, online: Callable[[int], bool]) -> list[int]:
        chances = self.participation(scene.clients)
        key = mix(scene.seed, Stream.PARTICIPATION, number)
        return [c for c, chance in enumerate(chances) if uniform(c, after=key) < chance and online(c)]


@dataclass(frozen=True)
class Cohort:
    """Rounds of `size` clients drawn uniformly among those online."""

    size: int = 10
    deadline: float | None = None
    idle: float = 1.0

    def __post_init__(self) -> None:
        within("size", self.size, 1, math.inf)
        _check_round(self.deadline, self.idle)

    def concurrency(self, clients: int) -> int:
        return min(self.size, clients)

    def participation(self, clients: int) -> tuple[float, ...]:
        if self.size > clients:
            raise InputError(f"rounds.size = {self.size} is above the {clients} clients there are: lower it")
        return (self.size / clients,) * clients

    def participants(self, scene: Scene, number: int, online: Callable[[int], bool]) -> list[int]:
        key = mix(scene.seed, Stream.PARTICIPATION, number)
        pool = [client for client in range(scene.clients) if online(client)]
        chosen = []
        for place in range(min(self.size, len(pool))):
            index = place + int(uniform(place, after=key) * (len(pool) - place))
            pool[place], pool[index] = pool[index], pool[place]
            chosen.append(pool[place])
        return chosen


def _check_round(deadline: float | None, idle: float) -> None:
    within("idle", idle, 0, math.inf, above=True)
    if deadline is not None:
        within("deadline", deadline, 0, math.inf, above=True)


SCHEDULERS: dict[str, type] = {
    "concurrency": Concurrency,
    "all": All,
    "check-in": CheckIn,
    "sampled-staleness": SampledStaleness,
    "ticks": Ticks,
}
ROUNDS: dict[str, type] = {"bernoulli": Bernoulli, "cohort": Cohort}
