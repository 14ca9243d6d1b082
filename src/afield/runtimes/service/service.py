"""Everything of a live server in one place: the fold, the desk, what is measured, what is kept, who may come in."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from afield.core.errors import InputError, within
from afield.core.flat import Layout
from afield.core.protocols import Evaluator
from afield.core.types import Receipt, Task
from afield.runtimes.rows import Measurement
from afield.runtimes.service.audit import Audit
from afield.runtimes.service.bodies import Room
from afield.runtimes.service.events import KEPT, History, values_of
from afield.runtimes.service.fold import Act, Batch, Door, Fold, Leased
from afield.runtimes.service.metrics import Metrics
from afield.runtimes.service.models import Kept
from afield.runtimes.service.plans import Free, Rounds
from afield.runtimes.service.privacy import Private
from afield.runtimes.service.shares import Shares, rule_of
from afield.runtimes.service.tasks import Desk
from afield.runtimes.service.trust import Book, Rates
from afield.runtimes.service.wire import Wire
from afield.runtimes.terms import Manners, Measuring

log = logging.getLogger(__name__)
MIB = 2**20


@dataclass(frozen=True)
class Terms:
    """What an operator may set; none of it changes what an update does to the model."""

    lease: float = 600.0  # seconds that a task is out without a sign of life
    wait: float = 30.0  # longest answer to who asks for a task
    buffer: int = 512  # MiB that updates on their way in may take
    rate: float = 50.0  # requests per second and client, in the long run
    burst: float = 200.0
    norm: float | None = None  # an update further from its base is refused
    keep: int = 5  # measured models kept for promotion

    def __post_init__(self) -> None:
        for name in ("lease", "wait", "rate"):
            within(name, getattr(self, name), 0, math.inf, above=True)
        within("buffer", self.buffer, 1, math.inf)
        within("burst", self.burst, 1, math.inf)
        within("keep", self.keep, 1, math.inf)
        if self.norm is not None:
            within("norm", self.norm, 0, math.inf, above=True)


@dataclass
class Parts:
    """What a service is made of."""

    name: str
    door: Any  # store.live.Durable, opened
    layout: Layout
    plan: Free | Rounds
    book: Book
    folder: Path
    table: Mapping[str, Any]  # the experiment's config, for clients that train by it
    terms: Terms = field(default_factory=Terms)
    evaluator: Evaluator | None = None
    measuring: Measuring = field(default_factory=Measuring)
    manners: Manners = field(default_factory=Manners)
    private: Private | None = None
    founded: float = 0.0  # the clock's time on the first day
    row: Callable[[Receipt | Measurement], None] | None = None
    measured: Sequence[Mapping[str, Any]] = ()  # rows of measurements before this start


class Service:
    """Made on the event loop that serves it."""

    def __init__(self, parts: Parts, ended: Callable[[str], None] = lambda why: None) -> None:
        self.parts, self.terms, self.name = parts, parts.terms, parts.name
        self.door: Door = parts.door
        self.wire = Wire(parts.layout)
        self.book = parts.book
        self.history = History()
        self.metrics = Metrics()
        self.room = Room(max(parts.terms.buffer * MIB, 4 * self.wire.limit))
        self.rates = Rates(parts.terms.rate, parts.terms.burst)
        self.strangers = Rates(0.5, 20.0)  # wrong tokens, per address
        self.private = parts.private
        self.kept = Kept(parts.folder / "models", self.wire, parts.terms.keep)
        self.audit = Audit(parts.folder / "audit.jsonl")
        # of this run; not of its name, which a restart without the config does not know
        self.tag = hashlib.blake2s(repr(parts.founded).encode(), digest_size=6).hexdigest()
        self.began = time.monotonic()
        # a clock that was set back between two lives does not make an arrival earlier than its task
        known = [receipt.arrived for receipt in parts.door.receipts.values()]
        known += [lease.task.started for lease in parts.door.server.leases.values()]
        self._offset: float = max([0.0, time.time() - parts.founded, *known])
        self.fold = Fold(parts.door, self._told, ended=ended)
        stale = parts.manners.max_staleness if parts.manners.stale == "restart" else None
        self.desk = Desk(
            self.fold,
            parts.plan,
            self.history,
            self.now,
            lease=parts.terms.lease,
            restart_after=stale,
            ended=self._ended,
        )
        self.helpers = ThreadPoolExecutor(2, thread_name_prefix="body")
        self.measurer = ThreadPoolExecutor(1, thread_name_prefix="measure")
        self.measuring = self.wanted = False
        self.measured = -1
        self.totals = Totals()
        self.shares = Shares(rule_of(parts.door.server.strategy), parts.door.server.clients)
        self._jobs: set[asyncio.Task[Any]] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._gauges()

    def now(self) -> float:
        """Seconds since the first day; whole microseconds, so that every JSON reader gives them back."""
        return round(self._offset + time.monotonic() - self.began, 6)

    # -- life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        door = self.parts.door
        server = door.server
        leases = [Leased(lease.task, lease.base, lease.correction) for lease in server.leases.values()]
        self.fold.start()
        self._recall(leases)
        self.desk.restore(leases, door.receipts, server.issued)
        self._tick()
        self._measure_by_time()
        if server.version == 0:
            self.measure()
        log.info("serving %s: version %d, %d tasks out", self.name, server.version, len(leases))

    def _recall(self, leases: Sequence[Leased]) -> None:
        """Who watches sees what happened before this start too, as far as it is remembered."""
        for row in self.parts.measured[-KEPT:]:
            self.history.add("measurement", row)
        for receipt in self.parts.door.receipts.values():
            self.history.add("receipt", values_of(receipt))
            self._shared(receipt)
        for leased in leases:
            self.history.add("task", values_of(leased.task))

    def drain(self) -> None:
        if not self.desk.draining:
            log.info("draining: %d tasks are out, %d orders wait", len(self.desk.open), self.fold.waiting)
            self.desk.drain()

    async def stop(self) -> None:
        """After the last reply: everything that was asked for is done, and on the disk."""
        self.drain()
        for timer in self._timers:
            timer.cancel()
        for job in list(self._jobs):
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        await self.fold.stop()
        self.helpers.shutdown()
        self.measurer.shutdown()
        self.audit.close()

    def _tick(self) -> None:
        """Once a second: what is buffered goes to its file; a snapshot where one is due."""
        self.audit.flush()
        if not self.fold.broken:
            self.fold.put(Act.CALL, lambda door: door.tend())
        self._later(1.0, self._tick)

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._timers = [
            timer for timer in self._timers if not timer.cancelled() and timer.when() > self.fold.loop.time()
        ]
        self._timers.append(self.fold.loop.call_later(seconds, what))

    def job(self, work: Any) -> None:
        """Something that goes on by itself; it ends with the service."""
        task = self.fold.loop.create_task(work)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    # -- what the fold tells ----------------------------------------------------------------------------------

    def _told(self, batch: Batch) -> None:
        before = self.desk.version
        self.metrics.folds.observe(batch.seconds)
        fresh: set[int] = set()  # an update may come twice in one batch, too
        for receipt in batch.receipts:
            if receipt.refused:
                self.totals.refuse(receipt.refused)
            elif receipt.number not in fresh and receipt.number not in self.desk.receipts:
                fresh.add(receipt.number)
                self.totals.add(receipt)
                self._shared(receipt)
                self.metrics.updates.inc()
                self.metrics.staleness.observe(receipt.staleness)
                if self.private is not None:
                    self.private.count(receipt.client)
            else:
                continue  # sent again
            if self.parts.row is not None:
                self.parts.row(receipt)
        self.shares.reached(batch.version)
        self.desk.told(batch)
        every = self.parts.measuring.versions
        if every is not None and batch.version // every > before // every:
            self.measure()

    def _ended(self, task: Task, why: str) -> None:
        self.metrics.ended.labels(why).inc()
        self.totals.ended[why] = self.totals.ended.get(why, 0) + 1
        self.audit.note("ended", client=task.client, number=task.number, why=why)
        if why == "expired":
            log.info("client %d was not heard of: task %d was taken back", task.client, task.number)

    def _shared(self, receipt: Receipt) -> None:
        self.shares.add(receipt.client, receipt.weight, receipt.stepped, receipt.version)

    # -- measuring --------------------------------------------------------------------------------------------

    def _measure_by_time(self) -> None:
        if self.parts.measuring.time is not None:
            self.measure()
            self._later(self.parts.measuring.time, self._measure_by_time)

    def measure(self) -> None:
        """Evaluate the newest version beside the fold; one at a time, a version once."""
        self.wanted = self.measuring
        if not self.measuring and not self.desk.draining:
            self.measuring = True
            self.job(self._measure())

    async def _measure(self) -> None:
        try:
            version, vector = await self.newest()
            if version == self.measured:
                return
            self.measured = version
            evaluator = self.parts.evaluator
            values: Mapping[str, Any] = {}
            if evaluator is not None:
                loop = self.fold.loop
                values = await loop.run_in_executor(self.measurer, lambda: dict(evaluator(vector)))
            await self.fold.loop.run_in_executor(self.measurer, self.kept.keep, version, vector)
            row = self.totals.measurement(self.now(), time.monotonic() - self.began, version, values)
            if self.private is not None:
                row = self.private.noted(row)
            self.history.add("measurement", row.row())
            for name, gauge in (("accuracy", self.metrics.accuracy), ("loss", self.metrics.loss)):
                if isinstance(values.get(name), float):
                    gauge.set(values[name])
            if self.parts.row is not None:
                self.parts.row(row)
        except (InputError, OSError) as error:  # the disk is full, say: the next version is measured
            log.error("a measurement failed: %s", error)
        finally:
            self.measuring = False
            if self.wanted:  # a newer version came meanwhile
                self.measure()

    async def newest(self) -> tuple[int, Tensor]:
        """A copy of the newest model, or the one on the shelf."""
        shelf = self.desk.shelf
        if shelf.newest is not None and shelf.newest.version == self.fold.version:
            return shelf.newest.version, shelf.newest.vector
        version, vector = await self.fold.put(
            Act.CALL, lambda door: (door.server.version, door.server.model())
        )
        shelf.put(version, vector)
        return version, vector

    # -- what is told -----------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        desk = self.desk
        last = self.history.measured[-1].values if self.history.measured else {}
        return {
            "name": self.name,
            "strategy": self.parts.table.get("strategy", {}),
            "state": "draining" if desk.draining else "broken" if self.fold.broken else "serving",
            "version": self.fold.version,
            "promoted": self.kept.promoted,
            "updates": self.totals.updates,
            "refusals": dict(self.totals.refusals),
            "ended": dict(self.totals.ended),  # tasks that were taken back
            "tasks": len(desk.open),
            "waiting": len(desk.waiters),
            "queue": self.fold.waiting,
            "clients": self.parts.door.server.clients,
            "now": self.now(),
            "uptime": time.monotonic() - self.began,
            "accuracy": last.get("accuracy"),
            "loss": last.get("loss"),
            "privacy": None if self.private is None else self.private.spent(),
        }

    def _gauges(self) -> None:
        gauge = self.metrics.gauge
        gauge("afield_version", "The newest version", lambda: self.fold.version)
        gauge("afield_tasks_open", "Tasks that are out", lambda: len(self.desk.open))
        gauge("afield_clients_waiting", "Clients that wait for a task", lambda: len(self.desk.waiters))
        gauge("afield_queue", "Orders that wait for the fold", lambda: self.fold.waiting)
        gauge("afield_room_free_bytes", "Memory left for updates on their way in", lambda: self.room.free)
        if self.private is not None:
            gauge("afield_epsilon", "Privacy spent so far", lambda: self.private.spent()["epsilon"])  # type: ignore[union-attr]


@dataclass
class Totals:
    """Sums over what was received since the start of this process."""

    updates: int = 0
    bytes: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    steps: int = 0  # local steps, as the clients tell
    # since the last measurement:
    arrived: int = 0
    staleness: int = 0
    told: int = 0  # losses that clients told of
    loss: float = 0.0

    def add(self, receipt: Receipt) -> None:
        self.updates += 1
        self.bytes += receipt.bytes
        self.arrived += 1
        self.staleness += receipt.staleness

    def refuse(self, reason: str) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    def measurement(self, now: float, wall: float, version: int, values: Mapping[str, Any]) -> Measurement:
        mean = self.staleness / self.arrived if self.arrived else None
        loss = self.loss / self.told if self.told else None
        self.arrived = self.staleness = self.told = 0
        self.loss = 0.0
        return Measurement(now, wall, version, self.updates, self.steps, self.bytes, mean, loss, values)

    def learned(self, steps: int, loss: float | None) -> None:
        """What a client told with an update that was accepted."""
        self.steps += steps
        if loss is not None and math.isfinite(loss):
            self.told += 1
            self.loss += loss
