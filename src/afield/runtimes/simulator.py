"""The exact simulator: a virtual clock, a heap of events, and training late, in blocks.

Nothing is trained at dispatch. When the earliest arrival of the heap has no result yet, every untrained task in
flight is trained in one call, earliest arrivals first: their bases are all known, so this is exact (law 3).
Whoever wants to know what happens iterates over `rows()`: receipts and measurements, in order.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from afield.core.errors import InputError, one_of, within
from afield.core.held import HeldDeltas
from afield.core.protocols import Evaluator, Trainer
from afield.core.server import Server
from afield.core.types import LocalResult, Receipt, Scene, Task

ARRIVE, ABORT, WAKE, CLOSE, MEASURE = range(5)
# at one instant: first what was asked to be measured at once, then arrivals, then ends of rounds, then the clock's
# measurements, which so see everything up to and including their instant
NOW, FIRST, THEN, LAST = range(4)


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


@dataclass(frozen=True, slots=True)
class Measurement:
    """The model at one moment."""

    time: float
    wall: float
    version: int
    updates: int
    bytes: int
    staleness: float | None  # mean over the updates since the last measurement
    train_loss: float | None  # likewise
    values: Mapping[str, Any]

    def row(self) -> dict[str, Any]:
        row = {name: getattr(self, name) for name in self.__slots__ if name != "values"}
        return {**row, **self.values}


class Flow:
    """Decides who starts when: free-running, by ticks, by sampled staleness, or in rounds."""

    def begin(self, sim: Simulator) -> None:
        raise NotImplementedError

    def freed(self, sim: Simulator, client: int, count: int, hold: bool) -> None:
        """A client's task is over: it may train again."""

    def settled(self, sim: Simulator, task: Task, receipt: Receipt | None) -> None:
        """An arrival was dealt with (None: the task was aborted)."""

    def stepped(self, sim: Simulator) -> None:
        """The version rose."""

    def woke(self, sim: Simulator, client: int) -> None:
        """A WAKE event that was set for this client."""

    def closed(self, sim: Simulator, mark: int) -> None:
        """A CLOSE event that the flow had set."""


@dataclass(slots=True)
class Flight:
    task: Task
    arrival: float
    order: int


@dataclass(slots=True)
class Since:
    """Sums since the last measurement."""

    updates: int = 0
    staleness: int = 0
    losses: list[float] = field(default_factory=list)


class Simulator:
    """Moves tasks and updates on a virtual clock. The same seed gives the same receipts and bits."""

    def __init__(
        self,
        server: Server,
        trainer: Trainer,
        flow: Flow,
        scene: Scene,
        *,
        delay: Callable[[int, int], float],
        presence: Callable[[int, float], tuple[bool, float]],
        stop: Stop,
        evaluator: Evaluator | None = None,
        measuring: Measuring = Measuring(),
        manners: Manners = Manners(),
        block: int = 64,
    ) -> None:
        within("block", block, 1, math.inf)
        self.server = server
        self.trainer = trainer
        self.flow = flow
        self.scene = scene
        self.delay = delay
        self.presence = presence
        self.stop = stop
        self.evaluator = evaluator
        self.measuring = measuring
        self.manners = manners
        self.block = block
        self.now = 0.0
        self.updates = 0
        self.bytes = 0
        # time, order at that time, sequence, kind, what
        self.heap: list[tuple[float, int, int, int, int]] = []
        self.sequence = 0
        self.flights: dict[int, Flight] = {}
        self.untrained: dict[int, Flight] = {}
        self.results: dict[int, LocalResult] = {}
        self.held = HeldDeltas(server.parameters) if getattr(server.strategy, "client_held", False) else None
        self.since = Since()
        self.measured = (-1.0, -1, -1)  # time, version and updates of the last measurement
        self.ended = ""  # why the run ended, once it has
        self._began = time.perf_counter()

    # -- what flows use ---------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self.flights)

    def online(self, client: int) -> bool:
        return self.presence(client, self.now)[0]

    def gone(self, client: int, when: float) -> bool:
        """Whether a client is offline at that instant and never comes back."""
        return self.presence(client, when) == (False, math.inf)

    def push(self, when: float, order: int, kind: int, what: int) -> None:
        heapq.heappush(self.heap, (when, order, self.sequence, kind, what))
        self.sequence += 1

    def dispatch(self, client: int, arrival: float | None = None) -> Task:
        """Hand a task to a client; it arrives after its delay (or at the given instant)."""
        task = self.server.checkout(client, self.now)
        arrives = True
        if arrival is None:
            arrival, arrives = self._finish(client, self.delay(client, task.count))
        flight = Flight(task, arrival, self.sequence)
        self.flights[task.number] = flight
        if arrives:
            self.untrained[task.number] = flight
        self.push(arrival, FIRST, ARRIVE if arrives else ABORT, task.number)
        return task

    def start_or_wait(self, client: int) -> None:
        """Start this very client now, or when it is back online; one that left for good is forgotten."""
        online, until = self.presence(client, self.now)
        if online:
            self.dispatch(client)
        elif until < math.inf:
            self.push(until, FIRST, WAKE, client)

    def lively(self) -> bool:
        """Whether anything but measurements is still to come."""
        return any(kind != MEASURE for _, _, _, kind, _ in self.heap)

    def cancel(self, number: int) -> None:
        flight = self.flights.pop(number)
        self.untrained.pop(number, None)
        self.results.pop(number, None)
        self.server.cancel(flight.task)

    # -- the loop ---------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[Receipt | Measurement]:
        """Run to the end, yielding each receipt and measurement as it is made."""
        yield self._measure()
        if self.measuring.time is not None:
            self.push(self.measuring.time, LAST, MEASURE, 1)
        self.flow.begin(self)
        while not self.ended:
            if not self.heap:
                self.ended = "nobody is left"
                self.now = self.now if self.stop.time is None else self.stop.time
                break
            when, _, _, kind, what = heapq.heappop(self.heap)
            if self.stop.time is not None and when > self.stop.time:
                self.now = self.stop.time
                self.ended = "time"
                break
            self.now = when
            yield from self._event(kind, what)
        if self.measured != (self.now, self.server.version, self.updates):
            yield self._measure()

    def _event(self, kind: int, what: int) -> Iterator[Receipt | Measurement]:
        before = self.server.version
        if kind == ARRIVE and what in self.flights:
            yield self._arrive(what)
        elif kind == ABORT and what in self.flights:
            flight = self.flights[what]
            self.cancel(what)
            self.flow.freed(self, flight.task.client, flight.task.count, hold=False)
            self.flow.settled(self, flight.task, None)
        elif kind == WAKE:
            self.flow.woke(self, what)
        elif kind == CLOSE:
            self.flow.closed(self, what)
        elif kind == MEASURE:
            if what and self.measuring.time is not None and self.lively():
                # the next instant of the grid, by its number: steps of 0.1 would add up to 0.7999
                self.push((what + 1) * self.measuring.time, LAST, MEASURE, what + 1)
            measurement = self._measure()
            yield measurement
            self._check_accuracy(measurement)
        if self.server.version > before:
            self._stepped()

    def _arrive(self, number: int) -> Receipt:
        flight = self.flights[number]
        if number not in self.results:
            self._train()
        task, result = flight.task, self.results.pop(number)
        del self.flights[number]
        server = self.server
        bound = self.manners.max_staleness
        fresh = bound is None or server.version - task.version <= bound
        ahead = self.manners.reply == "before" and fresh
        if ahead:
            self.flow.freed(self, task.client, task.count, hold=False)
        sent = self.held.prepare(task.client, result.model, server.base(task)) if self.held else None
        receipt = server.submit(result.answer(task, self.now, sent))
        if receipt.refused:
            server.cancel(task)
        else:
            self._count(receipt, result)
        if receipt.refused == "too-stale":
            self.start_or_wait(task.client)
        elif not ahead:
            self.flow.freed(self, task.client, task.count, hold=receipt.hold)
        self.flow.settled(self, task, receipt)
        return receipt

    def _count(self, receipt: Receipt, result: LocalResult) -> None:
        if self.held is not None:
            self.held.commit(receipt.client)
        self.updates += 1
        self.bytes += receipt.bytes
        self.since.updates += 1
        self.since.staleness += receipt.staleness
        if "loss" in result.metrics:
            self.since.losses.append(result.metrics["loss"])
        if self.stop.updates is not None and self.updates >= self.stop.updates:
            self.ended = "updates"

    def _stepped(self) -> None:
        version = self.server.version
        if self.measuring.versions is not None and version % self.measuring.versions == 0:
            self.push(self.now, NOW, MEASURE, 0)
        if self.stop.versions is not None and version >= self.stop.versions:
            self.ended = "versions"
        if self.manners.stale == "restart" and self.manners.max_staleness is not None:
            oldest = version - self.manners.max_staleness
            # flights are in the order of their versions: the late ones come first
            for number in list(takewhile(lambda n: self.flights[n].task.version < oldest, self.flights)):
                client = self.flights[number].task.client
                self.cancel(number)
                self.start_or_wait(client)
        self.flow.stepped(self)

    def _train(self) -> None:
        """Train what is in flight, earliest arrivals first, as much as the block limit leaves room for."""
        room = max(1, self.block - len(self.results))
        horizon = math.inf if self.stop.time is None else self.stop.time
        due = (flight for flight in self.untrained.values() if flight.arrival <= horizon)
        chosen = heapq.nsmallest(room, due, key=lambda flight: (flight.arrival, flight.order))
        tasks = [flight.task for flight in chosen]
        bases = [self.server.base(task) for task in tasks]
        corrections = [self.server.correction(task) for task in tasks]
        for task, result in zip(tasks, self.trainer.train(tasks, bases, corrections), strict=True):
            self.results[task.number] = result
            del self.untrained[task.number]

    def _measure(self) -> Measurement:
        since, self.since = self.since, Since()
        self.measured = (self.now, self.server.version, self.updates)
        values = dict(self.evaluator(self.server.model())) if self.evaluator is not None else {}
        losses = [loss for loss in since.losses if math.isfinite(loss)]
        return Measurement(
            time=self.now,
            wall=time.perf_counter() - self._began,
            version=self.server.version,
            updates=self.updates,
            bytes=self.bytes,
            staleness=since.staleness / since.updates if since.updates else None,
            train_loss=sum(losses) / len(losses) if losses else None,
            values=values,
        )

    def _check_accuracy(self, measurement: Measurement) -> None:
        reached = measurement.values.get("accuracy")
        if self.stop.accuracy is not None and reached is not None and reached >= self.stop.accuracy:
            self.ended = "accuracy"

    def _finish(self, client: int, work: float) -> tuple[float, bool]:
        """When a task that needs `work` online time is done; or when it is lost, and False."""
        when = self.now
        while True:
            online, until = self.presence(client, when)
            if online and when + work <= until:
                return when + work, True
            if online and (self.manners.offline == "abort" or self.gone(client, until)):
                # lost: also where it would be paused for ever
                return until, False
            if online:
                work -= until - when
            when = until
