"""Who starts when, on a real clock: as the scheduler picks among those who ask, or in rounds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from afield.core.errors import InputError
from afield.core.protocols import Dispatcher
from afield.core.types import Receipt, Scene, Task
from afield.runtimes.service.fold import Act
from afield.runtimes.service.tasks import Desk
from afield.scenarios.schedulers import Bernoulli, Cohort, SampledStaleness, Ticks

log = logging.getLogger(__name__)


class Free:
    """Whoever asks is idle; the scheduler picks among the idle. `once`: a client counts at most once per version."""

    def __init__(self, dispatcher: Dispatcher, once: bool = False) -> None:
        self.dispatcher, self.once = dispatcher, once
        self.idle: set[int] = set()  # those the dispatcher knows of
        self.held: set[int] = set()  # wait for the next version
        self.resting: set[int] = set()

    def begin(self, desk: Desk, receipts: Iterable[Receipt]) -> None:
        self.desk = desk
        version = desk.fold.version
        self.held = {r.client for r in receipts if r.version == version and not r.stepped and self._holds(r)}

    def _holds(self, receipt: Receipt) -> bool:
        return self.once or (receipt.hold and self.dispatcher.holds)

    def asked(self, client: int) -> None:
        if client in self.held or client in self.resting or client in self.desk.of:
            return
        if client not in self.idle:
            self.idle.add(client)
            self.dispatcher.ready(client)
        self.fill()

    def fill(self) -> None:
        if self.desk.draining:
            return
        while (client := self.dispatcher.pick(self.desk.running)) is not None:
            self.idle.discard(client)
            if client in self.desk.waiters:  # else it has gone, and is idle again when it asks again
                self.desk.start(client)

    def settled(self, task: Task, receipt: Receipt | None) -> None:
        client = task.client
        if receipt is not None and self._holds(receipt) and not receipt.stepped:
            self.held.add(client)
        elif receipt is not None and (pause := self.dispatcher.rest(client, task.count)):
            self.resting.add(client)
            self.desk.loop.call_later(pause, self._woke, client)
        elif client in self.desk.waiters:
            self.asked(client)
        self.fill()

    def dropped(self, client: int) -> None:
        """Its task could not be made."""

    def _woke(self, client: int) -> None:
        self.resting.discard(client)
        if client in self.desk.waiters:
            self.asked(client)

    def stepped(self) -> None:
        freed, self.held = self.held, set()
        for client in sorted(freed):
            if client in self.desk.waiters:
                self.asked(client)
        self.fill()


class Rounds:
    """Participants are drawn among those who ask. A round closes when all have answered, or at its deadline.

    It begins when all clients ask, or `idle` seconds after the first did, so that it is not always the quick ones who
    take part.
    """

    def __init__(
        self, scheduler: Bernoulli | Cohort, scene: Scene, number: int = 0, begun: bool = False
    ) -> None:
        self.scheduler, self.scene, self.number = scheduler, scene, number
        self.begun = begun  # tasks of this round were handed out
        self.members: set[int] = set()  # their clients, as long as they are out
        self.closing = False
        self.timer: asyncio.TimerHandle | None = None

    def begin(self, desk: Desk, receipts: Iterable[Receipt]) -> None:
        self.desk = desk
        self.members = {found.task.client for found in desk.open.values()}
        if self.members:
            self._limit()
        elif self.begun:  # it ended between its last answer and its close
            self._close()

    def asked(self, client: int) -> None:
        if self.begun or self.closing or self.desk.draining:
            return
        if len(self.desk.waiters) >= self.scene.clients:
            self._start()
        elif self.timer is None:
            self.timer = self.desk.loop.call_later(self.scheduler.idle, self._impatient)

    def _impatient(self) -> None:
        self.timer = None
        if self.desk.waiters and not self.begun and not self.closing:
            self._start()

    def _start(self) -> None:
        self._rest()
        chosen = self.scheduler.participants(self.scene, self.number, lambda c: c in self.desk.waiters)
        self.desk.history.add("round", {"round": self.number, "clients": len(chosen)})
        self.begun = True
        self.members = set(chosen)
        for client in chosen:
            self.desk.start(client)
        if chosen:
            self._limit()
        else:  # a round of nobody lasts its while, as in a simulation
            self.timer = self.desk.loop.call_later(self.scheduler.idle, self._close)

    def _limit(self) -> None:
        if self.scheduler.deadline is not None:
            self.timer = self.desk.loop.call_later(self.scheduler.deadline, self._close)

    def _rest(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def settled(self, task: Task, receipt: Receipt | None) -> None:
        self.dropped(task.client)

    def dropped(self, client: int) -> None:
        self.members.discard(client)
        if self.begun and not self.members and not self.closing:
            self._close()

    def stepped(self) -> None:
        pass

    def _close(self) -> None:
        self._rest()
        self.closing = True
        for found in list(self.desk.open.values()):
            self.desk.take_back(found, "round-over")
        answer = self.desk.fold.put(Act.CLOSE, None)
        answer.add_done_callback(self._closed)

    def _closed(self, done: asyncio.Future[int]) -> None:
        self.closing = False
        if done.cancelled() or done.exception() is not None:
            log.error("round %d could not be closed: %s", self.number, done.exception())
            self.timer = self.desk.loop.call_later(self.scheduler.idle, self._close)
            return
        self.begun, self.members = False, set()
        self.number += 1
        if self.desk.waiters:
            self.asked(next(iter(self.desk.waiters)))


def plan_for(
    strategy: Any,
    scheduler: Any,
    rounds: Bernoulli | Cohort,
    scene: Scene,
    *,
    number: int,
    begun: bool,
    once: bool,
) -> Free | Rounds:
    """The plan of a strategy; what only makes sense on a virtual clock is refused."""
    pace = getattr(strategy, "pace", "arrival")
    if pace == "round":
        return Rounds(rounds, scene, number, begun)
    if pace == "tick" or isinstance(scheduler, Ticks):
        raise InputError("ticks are of virtual time: a service needs per = 'arrival' and another scheduler")
    if isinstance(scheduler, SampledStaleness):
        raise InputError(
            "sampled-staleness draws who is late: a service has clients that are; use 'all' or 'concurrency'"
        )
    return Free(scheduler.bind(scene), once)
