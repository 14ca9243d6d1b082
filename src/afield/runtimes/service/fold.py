"""The one thread that touches the server's state. Whoever wants something of it puts it on a bounded queue.

What waits when the thread turns to the queue is done together: first the updates, in the order of their arrival and
with one sync for all (group commit), then what was cancelled, then ends of rounds, then new tasks, which so start
from the newest version.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from afield.core.errors import InputError
from afield.core.server import Server
from afield.core.types import Receipt, Task, Update

log = logging.getLogger(__name__)
BATCH = 64  # updates in one sync: more would make the first of them wait for the last


class Door(Protocol):
    """What the thread asks of store.live.Durable."""

    @property
    def server(self) -> Server: ...
    @property
    def broken(self) -> str: ...
    def checkout(self, client: int, now: float, version: int | None = None) -> Task: ...
    def cancel(self, task: Task) -> None: ...
    def close_round(self) -> int: ...
    def submit_all(self, updates: Sequence[Update]) -> list[Receipt]: ...


class Act(enum.IntEnum):
    """What may be asked for, in the order in which it is done."""

    SUBMIT = 0
    CANCEL = 1
    CLOSE = 2
    CALL = 3  # any function of the door
    CHECKOUT = 4


class FullError(RuntimeError):
    """The queue is full: the client is to come again later."""


class BrokenError(RuntimeError):
    """The state in memory is of no use any more: the process must be started again."""


@dataclass(frozen=True, slots=True)
class Leased:
    """A task, and what was leased with it; the tensors are never written to."""

    task: Task
    base: Tensor
    correction: Tensor | None


@dataclass(slots=True)
class Order:
    act: Act
    what: Any
    answer: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one turn of the thread did."""

    receipts: list[Receipt]
    version: int
    seconds: float


class Fold:
    """Runs the door on its own thread, and answers on the event loop."""

    def __init__(
        self, door: Door, told: Callable[[Batch], None], *, most: int = 20_000, ended: Callable[[str], None]
    ) -> None:
        self.door, self.told, self.most, self.ended = door, told, most, ended
        self.loop = asyncio.get_running_loop()
        self.version = door.server.version  # as the event loop knows it
        self.broken = ""
        self._queue: deque[Order] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="fold", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def put(self, act: Act, what: Any) -> asyncio.Future[Any]:
        """Ask for something; called on the event loop."""
        if self.broken:
            raise BrokenError(self.broken)
        if len(self._queue) >= self.most and act in (Act.SUBMIT, Act.CHECKOUT):
            raise FullError
        order = Order(act, what, self.loop.create_future())
        with self._wake:
            self._queue.append(order)
            self._wake.notify()
        return order.answer

    async def stop(self) -> None:
        """Do what is waiting, then end."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    # -- on the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while orders := self._take():
            began = time.perf_counter()
            answers: list[tuple[Order, Any]] = []
            updates = [order for order in orders if order.act is Act.SUBMIT]
            receipts = self._submit(updates, answers) if updates else []
            rest = sorted(
                (order for order in orders if order.act is not Act.SUBMIT), key=lambda order: order.act
            )
            answers.extend((order, self._do(order)) for order in rest)
            version = self.door.server.version
            batch = Batch(receipts, version, time.perf_counter() - began)
            self.loop.call_soon_threadsafe(self._deliver, batch, answers)

    def _take(self) -> list[Order]:
        """Everything that waits, but not more than a batch of updates; nothing once it is time to end."""
        with self._wake:
            while not self._queue and not self._stopping:
                self._wake.wait()
            taken: list[Order] = []
            updates = 0
            while self._queue and updates < BATCH:
                taken.append(self._queue.popleft())
                updates += taken[-1].act is Act.SUBMIT
            return taken

    def _submit(self, orders: list[Order], answers: list[tuple[Order, Any]]) -> list[Receipt]:
        try:
            receipts = self.door.submit_all([order.what for order in orders])
        except Exception as error:
            answers.extend((order, self._failed(error)) for order in orders)
            return []
        answers.extend(zip(orders, receipts, strict=True))
        return receipts

    def _do(self, order: Order) -> Any:
        door, what = self.door, order.what
        try:
            if order.act is Act.CHECKOUT:
                # a vector that nobody leases any more may still be on its way to a client: it is never written again
                door.server.versions.spare.clear()
                task = door.checkout(*what)
                return Leased(task, door.server.base(task), door.server.correction(task))
            if order.act is Act.CANCEL:
                return door.cancel(what)
            if order.act is Act.CLOSE:
                return door.close_round()
            return what(door)
        except Exception as error:
            return self._failed(error)

    def _failed(self, error: Exception) -> Exception:
        """A full disk passes; anything else leaves a state that only the journal can make good."""
        if not isinstance(error, InputError):
            log.exception("the fold failed")
        self.broken = self.broken or self.door.broken
        return error

    # -- on the event loop ------------------------------------------------------------------------------------

    def _deliver(self, batch: Batch, answers: list[tuple[Order, Any]]) -> None:
        self.version = batch.version
        try:
            self.told(batch)
        finally:  # what was done is answered, whatever those who are told make of it
            for order, value in answers:
                if order.answer.done():
                    continue  # who asked has gone
                if isinstance(value, Exception):
                    order.answer.set_exception(value)
                    order.answer.exception()  # looked at: nobody may be waiting
                else:
                    order.answer.set_result(value)
            if self.broken:
                self.ended(self.broken)
