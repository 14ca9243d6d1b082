"""The life of a task, on the event loop: asked for, leased until a deadline, answered, or taken back.

A client has one task at a time: who asks again, after a lost reply say, is given the same one. A lease lasts so many
seconds from its last sign of life; one that runs out is cancelled and its slot goes back to the scheduler.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Tensor

from afield.core.types import Receipt, Task, Update
from afield.runtimes.service.events import History, values_of
from afield.runtimes.service.fold import Act, Batch, BrokenError, Fold, FullError, Leased

log = logging.getLogger(__name__)
RETRY = 1.0  # seconds until a task that could not be taken back is looked at again
REMEMBERED = 10_000  # tasks of which it is known how they ended


@dataclass(eq=False, slots=True, weakref_slot=True)
class Shelved:
    """A model that may be downloaded; the vector is never written to."""

    version: int
    vector: Tensor
    made: dict[str, Any] = field(default_factory=dict)  # other forms of it, once asked for


class Shelf:
    """Models by version: as long as a task, a download or the newest place holds one, it can be had."""

    def __init__(self) -> None:
        self.held: WeakValueDictionary[int, Shelved] = WeakValueDictionary()
        self.newest: Shelved | None = None

    def put(self, version: int, vector: Tensor) -> Shelved:
        found = self.held.get(version)
        if found is None:
            found = self.held[version] = Shelved(version, vector)
            if self.newest is None or version >= self.newest.version:
                self.newest = found
        return found

    def get(self, version: int) -> Shelved | None:
        return self.held.get(version)


@dataclass(eq=False, slots=True)
class Open:
    """A task that is out."""

    task: Task
    model: Shelved
    correction: Tensor | None
    lease: str
    deadline: float
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None
    busy: int = 0  # requests that are dealing with it: it does not run out under their hands


def lease_of(task: Task) -> str:
    """What proves that a client means just this task: numbers not yet on the disk may be given anew after a crash."""
    text = f"{task.number} {task.client} {task.count} {task.version} {task.started!r}"
    return hashlib.blake2s(text.encode(), digest_size=8).hexdigest()


class Plan(Protocol):
    """Who starts when; see plans.py."""

    def begin(self, desk: Desk, receipts: Iterable[Receipt]) -> None: ...
    def asked(self, client: int) -> None: ...
    def settled(self, task: Task, receipt: Receipt | None) -> None: ...
    def stepped(self) -> None: ...
    def dropped(self, client: int) -> None: ...


class Desk:
    """Hands tasks out and takes updates in. Everything here runs on the event loop; the fold does the rest."""

    def __init__(
        self,
        fold: Fold,
        plan: Plan,
        history: History,
        clock: Callable[[], float],
        *,
        lease: float = 600.0,
        restart_after: int | None = None,
        ended: Callable[[Task, str], None] = lambda task, why: None,
    ) -> None:
        self.fold, self.plan, self.history, self.clock = fold, plan, history, clock
        self.ended = ended  # told of tasks that were taken back, and why
        self.lease, self.restart_after = lease, restart_after
        self.shelf = Shelf()
        self.open: dict[int, Open] = {}
        self.of: dict[int, int] = {}  # the open task of each client
        self.starting: set[int] = set()
        self.waiters: dict[int, set[asyncio.Future[Open | None]]] = {}
        self.receipts: OrderedDict[int, Receipt] = OrderedDict()
        self.endings: OrderedDict[int, str] = OrderedDict()  # of tasks that were taken back: why
        self.issued = 0
        self.version = fold.version
        self.draining = False
        self.loop = asyncio.get_running_loop()

    def restore(self, leases: Iterable[Leased], receipts: Mapping[int, Receipt], issued: int) -> None:
        """Go on after a restart: every lease begins anew, receipts are known again."""
        self.issued = issued
        self.receipts.update(receipts)
        for leased in leases:
            self._opened(leased)
        self.plan.begin(self, receipts.values())

    @property
    def running(self) -> int:
        return len(self.open) + len(self.starting)

    # -- asking for a task ------------------------------------------------------------------------------------

    def current(self, client: int) -> Open | None:
        number = self.of.get(client)
        return None if number is None else self.open[number]

    def ask(self, client: int) -> asyncio.Future[Open | None]:
        """A place in the queue; the answer is None where there will be no task (the server is draining)."""
        place: asyncio.Future[Open | None] = self.loop.create_future()
        self.waiters.setdefault(client, set()).add(place)
        if client not in self.starting and not self.draining:
            self.plan.asked(client)
        return place

    def leave(self, client: int, place: asyncio.Future[Open | None]) -> None:
        """Who asked has gone, or has its answer."""
        places = self.waiters.get(client)
        if places is not None:
            places.discard(place)
            if not places:
                del self.waiters[client]
        place.cancel()

    def start(self, client: int) -> None:
        """Called by the plan: this client's turn."""
        try:
            answer = self.fold.put(Act.CHECKOUT, (client, self.clock()))
        except (FullError, BrokenError) as error:
            self._refused(client, error)
            return
        self.starting.add(client)
        answer.add_done_callback(lambda done: self._started(client, done))

    def _started(self, client: int, done: asyncio.Future[Leased]) -> None:
        self.starting.discard(client)
        failure = done.exception()
        if failure is not None:
            self._refused(client, failure)
            return
        places = self.waiters.pop(client, set())
        found = self._opened(done.result())
        self.issued = max(self.issued, found.task.number + 1)
        self.history.add("task", values_of(found.task))
        for place in places:
            if not place.done():
                place.set_result(found)

    def _refused(self, client: int, failure: BaseException) -> None:
        for place in self.waiters.pop(client, set()):
            if not place.done():
                place.set_exception(failure)
        self.plan.dropped(client)

    def _opened(self, leased: Leased) -> Open:
        task = leased.task
        model = self.shelf.put(task.version, leased.base)
        deadline = self.loop.time() + self.lease
        found = Open(task, model, leased.correction, lease_of(task), deadline)
        self.open[task.number] = found
        self.of[task.client] = task.number
        found.timer = self.loop.call_at(deadline, self._due, found)
        return found

    # -- leases -----------------------------------------------------------------------------------------------

    def touch(self, found: Open) -> None:
        """A sign of life: the lease begins anew."""
        found.deadline = self.loop.time() + self.lease

    def _due(self, found: Open) -> None:
        if found.task.number not in self.open or self.fold.broken:
            return
        late = found.deadline - self.loop.time()
        if found.busy or late > 0:
            found.timer = self.loop.call_later(max(late, 1.0), self._due, found)
            return
        self.take_back(found, "expired")

    def take_back(self, found: Open, why: str) -> asyncio.Future[None]:
        """Cancel a task; an update that reached the fold before still counts."""
        answer = self.fold.put(Act.CANCEL, found.task)
        answer.add_done_callback(lambda done: self._taken_back(found, why, done))
        return answer

    def _taken_back(self, found: Open, why: str, done: asyncio.Future[None]) -> None:
        task = found.task
        if done.cancelled() or task.number not in self.open:
            return  # the server is ending, or it was answered in the meantime
        if done.exception() is not None:  # the disk is full, say: its slot must not be lost for ever
            if found.timer is not None:
                found.timer.cancel()
            found.timer = self.loop.call_later(RETRY, self._due, found)
            return
        self.endings[task.number] = why
        while len(self.endings) > REMEMBERED:
            self.endings.popitem(last=False)
        self._close(found)
        self.history.add("ended", {"number": task.number, "client": task.client, "why": why})
        self.ended(task, why)
        self.plan.settled(task, None)

    def _close(self, found: Open) -> None:
        task = found.task
        del self.open[task.number]
        if self.of.get(task.client) == task.number:
            del self.of[task.client]
        if found.timer is not None:
            found.timer.cancel()
        found.ended.set()

    # -- answering --------------------------------------------------------------------------------------------

    def submit(self, update: Update) -> asyncio.Future[Receipt]:
        return self.fold.put(Act.SUBMIT, update)

    def told(self, batch: Batch) -> None:
        """The fold has done a batch: close what was answered, free what it held."""
        for receipt in batch.receipts:
            if receipt.refused:
                self.history.add("refusal", values_of(receipt))
                continue
            if receipt.number in self.receipts:
                continue  # sent again: it has its receipt
            self.receipts[receipt.number] = receipt
            while len(self.receipts) > REMEMBERED:
                self.receipts.popitem(last=False)
            self.history.add("receipt", values_of(receipt))
            found = self.open.get(receipt.number)
            if found is not None:
                self._close(found)
                self.plan.settled(found.task, receipt)
            if receipt.stepped:  # before the next: that one belongs to the new version
                self._stepped(receipt.version)
        if batch.version > self.version:  # a round was closed
            self._stepped(batch.version)

    def _stepped(self, version: int) -> None:
        self.version = version
        if self.restart_after is not None:
            for found in list(self.open.values()):
                if version - found.task.version > self.restart_after and not found.busy:
                    self.take_back(found, "too-stale")
        self.plan.stepped()

    def drain(self) -> None:
        """No more tasks; whoever waits for one is told so."""
        self.draining = True
        self.history.add("drain", {})
        for found in self.open.values():
            found.ended.set()  # heartbeats that wait are answered: the task is still open
        for places in list(self.waiters.values()):
            for place in places:
                if not place.done():
                    place.set_result(None)
