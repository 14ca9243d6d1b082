"""The exact simulator: a virtual clock, a heap of events, and training late, in blocks.

Nothing is trained at dispatch. When the earliest arrival of the heap has no result yet, every untrained task in
flight is trained in one call, earliest arrivals first: their bases are all known, so this is exact (law 3).
Whoever wants to know what happens iterates over `rows()`: receipts and measurements, in order.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile

from torch import Tensor

from afield.core.errors import within
from afield.core.held import HeldDeltas
from afield.core.protocols import Evaluator, Trainer
from afield.core.server import Server
from afield.core.types import LocalResult, Receipt, Scene, Task
from afield.runtimes.diagnose import Diagnosis
from afield.runtimes.flow import Flow
from afield.runtimes.rows import Measurement
from afield.runtimes.terms import Manners, Measuring, Since, Stop

ARRIVE, ABORT, WAKE, CLOSE, MEASURE = range(5)
# at one instant: first what was asked to be measured at once, then arrivals, then ends of rounds, then the clock's
# measurements, which so see everything up to and including their instant
NOW, FIRST, THEN, LAST = range(4)
HOPELESS = 100  # so many models that are not finite, with nothing between them, end a run
Event = tuple[float, int, int, int, int]  # time, order at that time, sequence, kind, what
Ahead = Callable[[], LocalResult]  # a result that is being computed: the call waits for it


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block of tasks that the simulation cannot go on without."""

    tasks: list[Task]
    bases: list[Tensor]
    corrections: list[Tensor | None]


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
        diagnosis: Callable[[], Diagnosis] | None = None,
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
        self.diagnosis = diagnosis
        self.now = 0.0
        self.updates = 0
        self.steps_done = 0
        self.bytes = 0
        self.interrupted = 0  # tasks begun anew because they were too stale
        self.broken = 0  # models that were not finite, one after the other
        self.heap: list[Event] = []
        self.near: list[Event] = []  # a second heap: arrivals that were trained, and the events between them
        self.sequence = 0
        self.flights: dict[int, Task] = {}
        self.results: dict[int, LocalResult | Ahead] = {}
        self.held = HeldDeltas(server.parameters) if getattr(server.strategy, "client_held", False) else None
        # bases of strategies that do not read them go back once their task is trained
        self.spends = self.held is None and not server.keeps_bases
        self.eager = getattr(trainer, "eager", False)  # blocks are too narrow for its hands: at dispatch
        self.since = Since()
        self.measured = (-1.0, -1, -1)  # time, version and updates of the last measurement
        self.ended = ""  # why the run ended, once it has
        self.begun = False
        self.told = 0  # the version up to which the flow was told of steps
        self.asked: list[int] = []  # tasks of the block that is being trained
        self.late = deque[Receipt | Measurement]()  # rows that are not handed out yet
        self.pausing = False  # `walk` is to stop before the next block
        self.began = time.perf_counter()

    # -- what flows use ---------------------------------------------------------------------------------------

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
        self.flights[task.number] = task
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
        return any(kind != MEASURE for _, _, _, kind, _ in chain(self.near, self.heap))

    def cancel(self, number: int) -> None:
        task = self.flights.pop(number)
        self.results.pop(number, None)
        self.server.cancel(task)

    @property
    def still(self) -> bool:
        """Whether the run is at a point where it can be pictured (runtimes/picture.py)."""
        return self.begun and not self.late and not self.ended

    # -- the loop ---------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[Receipt | Measurement]:
        """Run to the end, yielding each receipt and measurement as it is made."""
        for row in self.walk():
            if not isinstance(row, Wanted):
                yield row

    def walk(self) -> Iterator[Receipt | Measurement | Wanted]:
        """The same; where `pausing` is set, also the next block, before it is trained and after all rows up to it.

        A measurement that a GPU has not finished yet waits, and the rows after it, until the next block was trained:
        evaluation and the preparation of that block go on side by side.
        """
        steps, results, late = self.steps(), None, self.late
        while True:
            try:
                row = steps.send(results)
            except StopIteration:
                break
            results = None
            if isinstance(row, Wanted):
                if self.pausing:
                    while late:
                        yield late.popleft()
                    yield row
                begin = getattr(self.trainer, "ahead", self.trainer.train)
                more = [self._due(row)] if self.eager else []
                results = begin(row.tasks, row.bases, row.corrections, *more)
                while late:
                    yield late.popleft()
            elif late or (isinstance(row, Measurement) and not isinstance(row.values, dict)):
                late.append(row)
            else:
                yield row
        while late:
            yield late.popleft()

    def steps(self) -> Generator[Receipt | Measurement | Wanted, Sequence[LocalResult | Ahead] | None, None]:
        """The same, but training is left to who runs it: each `Wanted` is answered by its results."""
        if not self.begun:
            yield self._measure()
            if self.measuring.time is not None:
                self.push(self.measuring.time, LAST, MEASURE, 1)
            self.flow.begin(self)
            self.begun = True
        if self.asked:  # the run was stopped before this block was trained
            yield from self._train(self.asked)
        while True:
            if self.server.version > self.told:
                self.told = self.server.version
                self._stepped()
            if self.ended:
                break
            if self.eager and len(self.flights) > len(self.results) and (early := self._block(least=0)):
                yield from self._train(early)
            near = self.near and (not self.heap or self.near[0] < self.heap[0])
            earliest = self.near if near else self.heap
            if not earliest:
                self.ended = "nobody is left"
                self.now = self.now if self.stop.time is None else self.stop.time
                break
            when, _, _, kind, what = earliest[0]
            if self.stop.time is not None and when > self.stop.time:
                self.now = self.stop.time
                self.ended = "time"
                break
            if kind == ARRIVE and what in self.flights and what not in self.results:
                yield from self._train(self._block())
                earliest = self.near  # it is there now
            heapq.heappop(earliest)
            self.now = when
            if kind == ARRIVE:
                if what in self.flights:
                    yield self._arrive(what)
            elif kind == MEASURE:
                self._measure_again(what)
                measurement = self._measure()
                self._check_accuracy(measurement)
                yield measurement
            else:
                self._turn(kind, what)  # gives no row
        if self.measured != (self.now, self.server.version, self.updates):
            yield self._measure()

    def _turn(self, kind: int, what: int) -> None:
        if kind == WAKE:
            self.flow.woke(self, what)
        elif kind == CLOSE:
            self.flow.closed(self, what)
        elif kind == ABORT and what in self.flights:
            task = self.flights[what]
            self.cancel(what)
            self.flow.freed(self, task.client, task.count, hold=False)
            self.flow.settled(self, task, None)

    def _arrive(self, number: int) -> Receipt:
        task, result = self.flights.pop(number), self.results.pop(number)
        if not isinstance(result, LocalResult):
            result = result()
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
            self._check_hope(receipt.refused)
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
        self.steps_done += result.steps
        self.bytes += receipt.bytes
        self.broken = 0
        self.since.updates += 1
        self.since.staleness += receipt.staleness
        if "loss" in result.metrics:
            self.since.losses.append(result.metrics["loss"])
        if self.stop.updates is not None and self.updates >= self.stop.updates:
            self.ended = "updates"

    def _check_hope(self, reason: str) -> None:
        """Training from a model that diverges may never give an update again."""
        self.broken = self.broken + 1 if reason == "not-finite" else 0
        if self.broken >= max(HOPELESS, 3 * self.scene.clients):
            self.ended = f"{self.broken} models in a row were not finite"

    def _stepped(self) -> None:
        version = self.server.version
        if self.measuring.versions is not None and version % self.measuring.versions == 0:
            self.push(self.now, NOW, MEASURE, 0)
        if self.stop.versions is not None and version >= self.stop.versions:
            self.ended = "versions"
        if self.manners.stale == "restart" and self.manners.max_staleness is not None:
            oldest = version - self.manners.max_staleness
            # flights are in the order of their versions: the late ones come first
            for task in list(takewhile(lambda task: task.version < oldest, self.flights.values())):
                self.cancel(task.number)
                self.interrupted += 1
                self.start_or_wait(task.client)
        self.flow.stepped(self)

    def _block(self, least: int = 1) -> list[int]:
        """What is in flight, earliest arrivals first, as much as the block limit leaves room for.

        The heap gives them in order, so a block costs by its own length, whatever is in flight; what was taken from
        it goes to the near heap, which is small where the block limit is. What can only arrive after the end is left
        out: beyond the stop's time, or behind as many arrivals as there are updates left.
        """
        room = max(least, self.block - len(self.results))
        horizon = math.inf if self.stop.time is None else self.stop.time
        left = math.inf if self.stop.updates is None else self.stop.updates - self.updates
        sooner: list[Event] = []  # arrivals that were trained; of interest near the end alone
        if left < len(self.flights):
            sooner = sorted(event for event in self.near if event[3] == ARRIVE and event[4] in self.flights)
        numbers: list[int] = []
        while len(numbers) < room and self.heap and self.heap[0][0] <= horizon:
            if len(numbers) + bisect(sooner, self.heap[0]) >= left:
                break
            event = heapq.heappop(self.heap)
            heapq.heappush(self.near, event)
            _, _, _, kind, what = event
            if kind == ARRIVE and what in self.flights:
                numbers.append(what)
        return numbers

    def _due(self, wanted: Wanted) -> list[float]:
        """When a block's tasks arrive, for a trainer that begins early: what is needed first comes first."""
        due = {what: when for when, _, _, kind, what in self.near if kind == ARRIVE}
        return [due.get(task.number, self.now) for task in wanted.tasks]

    def _train(self, numbers: list[int]) -> Generator[Wanted, Sequence[LocalResult | Ahead] | None, None]:
        self.asked = numbers
        tasks, server = [self.flights[number] for number in numbers], self.server
        bases = [server.base(task) for task in tasks]
        results = yield Wanted(tasks, bases, [server.correction(task) for task in tasks])
        assert results is not None
        self.results.update(zip(numbers, results, strict=True))
        self.asked = []
        if self.spends:
            for task, base, result in zip(tasks, bases, results, strict=True):
                # not of what is still being computed, nor where a trainer gives the base itself
                if isinstance(result, LocalResult) and result.model.data_ptr() != base.data_ptr():
                    server.trained(task)

    def _measure_again(self, mark: int) -> None:
        """Set the next measurement of the clock's (those of versions have the mark 0)."""
        if mark and self.measuring.time is not None and self.lively():
            # the next instant of the grid, by its number: steps of 0.1 would add up to 0.7999
            self.push((mark + 1) * self.measuring.time, LAST, MEASURE, mark + 1)

    def _measure(self) -> Measurement:
        since, self.since = self.since, Since()
        self.measured = (self.now, self.server.version, self.updates)
        values = self.evaluator(self.server.model()) if self.evaluator is not None else {}
        found = self.diagnosis() if self.diagnosis is not None else None
        losses = [loss for loss in since.losses if math.isfinite(loss)]
        return Measurement(
            time=self.now,
            wall=time.perf_counter() - self.began,
            version=self.server.version,
            updates=self.updates,
            steps=self.steps_done,
            bytes=self.bytes,
            staleness=since.staleness / since.updates if since.updates else None,
            train_loss=sum(losses) / len(losses) if losses else None,
            values=values if found is None else {**values, **found.values},
            clients=None if found is None else found.clients,
        )

    def _check_accuracy(self, measurement: Measurement) -> None:
        if self.stop.accuracy is None:
            return  # a look would make a GPU wait
        reached = measurement.values.get("accuracy")
        if reached is not None and reached >= self.stop.accuracy:
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
