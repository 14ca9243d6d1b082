"""How long a task takes, in seconds: a pure function of (seed, client, count), always above zero.

`bind(scene)` gives that function. A client's own speed is drawn once per run, its tasks' noise once per task.
"""

from __future__ import annotations

import bisect
import csv
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from afield.core.errors import InputError, one_of, within
from afield.core.keys import Stream, exponential, mix, normal, stream_key, uniform
from afield.core.types import Scene

Duration = Callable[[int, int], float]  # (client, its tasks so far) -> seconds

_WIDEST = 10.0  # sigma of a lognormal: e^(10 * 8.6), the largest keyed draw, is still a number


def _positive(name: str, value: float) -> None:
    within(name, value, 0, math.inf, above=True, below=True)


def _spent(mean: float, key: int, client: int, count: int) -> float:
    """An exponential draw; one of 0 (once in 2^53) would let a task end when it starts."""
    return mean * max(exponential(client, count, after=key), 1e-12)


@dataclass(frozen=True)
class Constant:
    """Every task takes the same time."""

    value: float = 1.0

    def __post_init__(self) -> None:
        _positive("value", self.value)

    def bind(self, scene: Scene) -> Duration:
        return lambda client, count: self.value


@dataclass(frozen=True)
class Uniform:
    """Uniform between low and high, for every task anew."""

    low: float = 0.5
    high: float = 1.5

    def __post_init__(self) -> None:
        _positive("low", self.low)
        within("high", self.high, self.low, math.inf, below=True)

    def bind(self, scene: Scene) -> Duration:
        key = stream_key(scene.seed, Stream.DELAY)
        return lambda client, count: self.low + (self.high - self.low) * uniform(client, count, after=key)


@dataclass(frozen=True)
class Exponential:
    """Exponential with one mean for all clients (ACE's experiments: mean 1, 5, 20, 30)."""

    mean: float = 1.0

    def __post_init__(self) -> None:
        _positive("mean", self.mean)

    def bind(self, scene: Scene) -> Duration:
        key = stream_key(scene.seed, Stream.DELAY)
        return lambda client, count: _spent(self.mean, key, client, count)


@dataclass(frozen=True)
class ExponentialMix:
    """Exponential, with a larger mean for a share of the clients (ACE's mixed delays)."""

    fast: float = 0.5
    slow: float = 5.0
    slow_share: float = 0.2  # exactly round(slow_share * N) clients are slow

    def __post_init__(self) -> None:
        _positive("fast", self.fast)
        _positive("slow", self.slow)
        within("slow_share", self.slow_share, 0, 1)

    def bind(self, scene: Scene) -> Duration:
        key, own = stream_key(scene.seed, Stream.DELAY), stream_key(scene.seed, Stream.SPEED)
        order = sorted(range(scene.clients), key=lambda client: mix(client, after=own))
        slow = frozenset(order[: round(self.slow_share * scene.clients)])
        return lambda client, count: _spent(self.slow if client in slow else self.fast, key, client, count)


@dataclass(frozen=True)
class LogNormal:
    """Lognormal, for every task anew."""

    median: float = 1.0
    sigma: float = 0.5

    def __post_init__(self) -> None:
        _positive("median", self.median)
        within("sigma", self.sigma, 0, _WIDEST)

    def bind(self, scene: Scene) -> Duration:
        key = stream_key(scene.seed, Stream.DELAY)
        return lambda client, count: self.median * math.exp(self.sigma * normal(client, count, after=key))


def _paced(seed: int, spread: float, noise: float) -> Duration:
    """A client's own lognormal factor times its task's."""
    key, own = stream_key(seed, Stream.DELAY), stream_key(seed, Stream.SPEED)

    @functools.cache
    def pace(client: int) -> float:
        return spread * normal(client, after=own)

    return lambda client, count: math.exp(pace(client) + noise * normal(client, count, after=key))


@dataclass(frozen=True)
class Speeds:
    """Each client has its own lognormal speed, and each task a little noise."""

    median: float = 1.0
    spread: float = 0.5  # sigma between clients
    noise: float = 0.1  # sigma between the tasks of one client

    def __post_init__(self) -> None:
        _positive("median", self.median)
        within("spread", self.spread, 0, _WIDEST)
        within("noise", self.noise, 0, _WIDEST)

    def bind(self, scene: Scene) -> Duration:
        factor = _paced(scene.seed, self.spread, self.noise)
        return lambda client, count: self.median * factor(client, count)


@dataclass(frozen=True)
class Work:
    """Proportional to the client's local steps (its examples, where the steps are not known)."""

    seconds_per_step: float = 0.1
    spread: float = 0.0  # sigma of the clients' own lognormal speeds
    noise: float = 0.0  # sigma between the tasks of one client

    def __post_init__(self) -> None:
        _positive("seconds_per_step", self.seconds_per_step)
        within("spread", self.spread, 0, _WIDEST)
        within("noise", self.noise, 0, _WIDEST)

    def bind(self, scene: Scene) -> Duration:
        work = scene.work or scene.sizes
        if len(work) != scene.clients:
            raise InputError(
                f"work is known of {len(work)} clients and there are {scene.clients}; give all or none"
            )
        factor = _paced(scene.seed, self.spread, self.noise)
        return lambda client, count: self.seconds_per_step * max(1, work[client]) * factor(client, count)


# FedEcho table 1, in units of 10 seconds: short, medium and long tasks.
RANGES = {
    "large": ((1.0, 2.0), (3.0, 5.0), (50.0, 80.0)),
    "mild": ((1.0, 2.0), (3.0, 5.0), (10.0, 20.0)),
}


@dataclass(frozen=True)
class Categories:
    """Short, medium and long clients, the larger ones rather long (FedEcho section 5, table 1).

    From the paper: the three uniform ranges of either level in units of 10 seconds, drawn for every
    task anew; at most 10 % of the clients are long; a smaller `gamma` ties the category more closely to
    the number of examples. The paper gives neither that rule nor the medium share. Ours: clients
    are ranked by (share of the clients with fewer examples) + gamma * u, u uniform; the top floor(long_share N)
    are long, the next round(medium_share N) medium. gamma = 0 goes by size alone, a large gamma by chance.
    The medium share is that of FADAS's code, from which this simulation descends (0.28, and 0.08 long).
    """

    level: str = "large"
    gamma: float = 1.0
    long_share: float = 0.1
    medium_share: float = 0.3
    unit: float = 10.0  # seconds

    def __post_init__(self) -> None:
        one_of("level", self.level, RANGES)
        within("gamma", self.gamma, 0, math.inf, below=True)
        within("long_share", self.long_share, 0, 1)
        within("medium_share", self.medium_share, 0, 1 - self.long_share + 1e-9)
        _positive("unit", self.unit)

    def categories(self, scene: Scene) -> list[int]:
        """Per client: 0 short, 1 medium, 2 long."""
        own, total = stream_key(scene.seed, Stream.SPEED), scene.clients
        ordered = sorted(scene.sizes)

        def score(client: int) -> tuple[float, float]:
            rank = bisect.bisect_left(ordered, scene.sizes[client]) / total
            luck = uniform(client, after=own)
            return rank + self.gamma * luck, luck  # luck alone decides between equal sizes

        slowest = sorted(range(total), key=score, reverse=True)
        long = math.floor(self.long_share * total + 1e-9)  # 0.29 * 100 is 28.999999999999996
        medium = round(self.medium_share * total)
        found = [0] * total
        for place, client in enumerate(slowest[: long + medium]):
            found[client] = 2 if place < long else 1
        return found

    def bind(self, scene: Scene) -> Duration:
        key, ranges = stream_key(scene.seed, Stream.DELAY), RANGES[self.level]
        limits = [ranges[category] for category in self.categories(scene)]

        def duration(client: int, count: int) -> float:
            low, high = limits[client]
            return self.unit * (low + (high - low) * uniform(client, count, after=key))

        return duration


def trace_rows(file: str, columns: Sequence[str], clients: int) -> Iterator[tuple[int, int, list[float]]]:
    """The rows of a CSV trace: line, client, and the numbers in `columns` (its other columns are ignored)."""
    header = ",".join(("client", *columns))
    if not file:
        raise InputError(f"file = '' names no trace; give a CSV file with the columns {header}")
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"file = {file!r} cannot be read ({error}); give a CSV file: {header}") from error
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    absent = [name for name in ("client", *columns) if name not in (reader.fieldnames or ())]
    if absent:
        raise InputError(f"{file}, line 1: no column {absent[0]!r}; the header must be {header}")
    for row in reader:
        line = reader.line_num
        try:
            client, values = int(row["client"]), [float(row[name]) for name in columns]
        except (TypeError, ValueError) as error:
            given = ",".join(str(row[name]) for name in ("client", *columns))
            raise InputError(f"{file}, line {line}: {given!r} is not a row of numbers {header}") from error
        if not 0 <= client < clients:
            raise InputError(
                f"{file}, line {line}: client {client} is unknown; there are clients 0..{clients - 1}"
            )
        yield line, client, values


@dataclass(frozen=True)
class Trace:
    """Measured durations: a CSV file with the columns client,duration (seconds).

    The rows of one client are used in turn, task by task, and then from the start again.
    """

    file: str = ""

    def bind(self, scene: Scene) -> Duration:
        durations: list[list[float]] = [[] for _ in range(scene.clients)]
        for line, client, (duration,) in trace_rows(self.file, ("duration",), scene.clients):
            if not 0 < duration < math.inf:
                raise InputError(f"{self.file}, line {line}: duration {duration} is outside (0, inf)")
            durations[client].append(duration)
        for client, own in enumerate(durations):
            if not own:
                raise InputError(f"{self.file}: client {client} has no row; every client needs one")
        return lambda client, count: durations[client][count % len(durations[client])]


DELAYS = {
    "constant": Constant,
    "uniform": Uniform,
    "exponential": Exponential,
    "exponential-mix": ExponentialMix,
    "lognormal": LogNormal,
    "speeds": Speeds,
    "work": Work,
    "categories": Categories,
    "trace": Trace,
}
