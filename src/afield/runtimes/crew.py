"""The actors of a cluster that a process trains with: who has which tasks, and what becomes of those of the lost."""

from __future__ import annotations

import contextlib
import logging
import math
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from afield.core.errors import InputError
from afield.core.types import Task
from afield.runtimes.actor import Actor, Answer, called, received

log = logging.getLogger("afield")

JOINED = 8  # tasks in one call where they may share one: it costs 0.7 ms, and 0.1 ms for each model of 70 kB
# Tasks that wait, per actor and task of a call. What shares a call comes back late: with 50 in flight and two actors,
# calls of 4 let the actors run out of what is due soon, and train 9 % more than 500 updates need; this 4 %.
SPARE = 8
DESKS = 2  # calls that an actor has: one that it works at, and the next
LOSSES = 3  # so many actors may be lost over one part before it counts as what kills them
PATIENCE = 300.0  # seconds without a single actor before a run gives up

Lent = Any  # a vector as bytes, or the reference of one in the object store


@dataclass(slots=True, eq=False)
class Job:
    """A task on its way; `answer` comes when it is done."""

    task: Task
    base: Lent
    correction: Lent | None
    answer: Answer | None = None
    asker: Callable[[], object] = bool  # gives who may ask for the answer; None: nobody can any more

    def __str__(self) -> str:
        return f"client {self.task.client}, task {self.task.number}"


@dataclass(slots=True, eq=False)
class Part:
    """Tasks of one run that go to one actor together. A part without any asks how that run is trained."""

    key: str
    kit: Any
    jobs: list[Job]
    due: float = -math.inf  # when the first of its answers is needed
    small: bool = False  # models travel with calls
    joins: bool = False  # may share a call with others: their tasks are trained one by one
    lost: int = 0  # actors
    method: str | Exception = ""

    @property
    def wanted(self) -> bool:
        """Not where all its tasks were cancelled, or their run is over."""
        return not self.jobs or any(job.asker() is not None for job in self.jobs)

    def done(self, answers: Sequence[Answer]) -> None:
        for job, answer in zip(self.jobs, answers, strict=True):
            job.answer = answer
            job.base = job.correction = None


@dataclass(slots=True, eq=False)
class Call:
    """What an actor was asked for, and the references of its answers."""

    parts: list[Part]
    references: list[Any]

    @classmethod
    def of(cls, parts: list[Part], seat: Seat) -> Call:
        first, actor, loading = parts[0], seat.actor, []
        if first.key not in seat.kits:
            loading = [actor.load.remote(first.key, first.kit)]  # calls are carried out in their order
            seat.kits.add(first.key)
        jobs = [job for part in parts for job in part.jobs]
        if not jobs:  # what cannot be loaded, such as a class that a node does not have, is told
            return cls(parts, [*loading, actor.method.remote(first.key)])
        lent: list[Lent] = []
        seen: dict[int, int] = {}

        def place(vector: Lent) -> int:
            if id(vector) not in seen:
                seen[id(vector)] = len(lent)
                lent.append(vector)
            return seen[id(vector)]

        places = [
            (place(job.base), None if job.correction is None else place(job.correction)) for job in jobs
        ]
        given = called(first.key, [job.task for job in jobs], places), *lent
        if len(jobs) == 1:
            return cls(parts, [actor.train_one.remote(*given)])
        if first.small:  # an answer each: then they come with the reply, not by way of the store
            return cls(parts, actor.train.options(num_returns=len(jobs)).remote(*given))
        return cls(parts, [actor.train.remote(*given)])

    def take(self, ray: Any) -> None:
        """Hand the answers out; raises where they are lost."""
        found = ray.get(self.references)
        if not self.parts[0].jobs:
            self.parts[0].method = found[-1]
            return
        answers = iter(found[0] if len(found) == 1 and isinstance(found[0], list) else found)
        for part in self.parts:
            part.done([received(next(answers)) for _ in part.jobs])


@dataclass(slots=True, eq=False)
class Seat:
    """An actor, or the wish for one: it counts once it has answered."""

    actor: Any
    hello: Any  # reference of its first answer; None once that is there
    process: int = 0
    flight: dict[Any, Call] = field(default_factory=dict)  # by its first reference
    kits: set[str] = field(default_factory=set)  # of the runs it knows


class Crew:
    """The actors of a cluster that this process trains with, and the parts that wait for one.

    A lost actor's parts go back among those, and so to the others; in its place another is asked for, which takes
    part as soon as some node has room for it.
    """

    def __init__(self, ray: Any, actors: int | None = None, cpus: int = 1, gpus: int = 0) -> None:
        self.ray = ray  # the module: only runtimes/ray.py imports it
        kind, each = ("GPU", gpus) if gpus else ("CPU", cpus)
        room = self.ray.cluster_resources().get(kind, 0.0)
        self.count = int(room // each) if actors is None else actors
        if self.count < 1:
            raise InputError(
                f"the Ray cluster has {room:g} {kind}s, and an actor takes {each}: add nodes, or lower runtime.cpus"
            )
        # task events are for Ray's dashboard, and sent for every call
        options = {"num_cpus": cpus, "num_gpus": gpus, "enable_task_events": False}
        self._make = self.ray.remote(Actor).options(**options).remote
        self._cpus = cpus
        self.waiting: list[Part] = []  # what is due first comes first
        self.lost = 0  # actors, so far
        self.seats = [self._seat() for _ in range(self.count)]

    def _seat(self) -> Seat:
        actor = self._make(self._cpus)
        return Seat(actor, actor.process.remote())

    def add(self, part: Part) -> None:
        insort(self.waiting, part, key=lambda one: one.due)

    def hasten(self, part: Part) -> None:
        """Somebody waits for this one."""
        part.due = -math.inf
        if part in self.waiting:
            self.waiting.remove(part)
            self.waiting.insert(0, part)

    def feed(self) -> None:
        """Give every actor a call, and its next one before it asks."""
        ready = [seat for seat in self.seats if seat.hello is None]
        while self.waiting and ready:
            seat = min(ready, key=lambda one: len(one.flight))
            if len(seat.flight) == DESKS:
                break
            if not self.waiting[0].wanted:
                self.waiting.pop(0)
                continue
            room = min(JOINED, len(self.waiting) // (SPARE * len(ready)))
            parts = [self.waiting.pop(0)]
            while (
                len(parts) < room
                and parts[0].due > -math.inf
                and self.waiting
                and parts[0].joins
                and self.waiting[0].joins
                and self.waiting[0].key == parts[0].key
            ):
                parts.append(self.waiting.pop(0))
            call = Call.of(parts, seat)
            seat.flight[call.references[0]] = call

    def collect(self, patience: float | None) -> bool:
        """Take what is done, waiting for the first so long (None: for ever), and hand out what is to do."""
        self.feed()
        seats = {reference: seat for seat in self.seats for reference in seat.flight}
        seats |= {seat.hello: seat for seat in self.seats if seat.hello is not None}
        alone = all(seat.hello is not None for seat in self.seats)
        limit = PATIENCE if alone and patience is None else patience
        ready, _ = self.ray.wait(list(seats), num_returns=1, timeout=limit)
        if not ready and alone and patience is None:
            raise RuntimeError(
                f"none of {self.count} actors found a place in {PATIENCE:g} s; the cluster has "
                f"{self.ray.available_resources()} to spare: add nodes, or end what holds them"
            )
        for reference in ready:
            self._take(seats[reference], reference)
        self.feed()
        return bool(ready)

    def _take(self, seat: Seat, reference: Any) -> None:
        try:
            if reference is seat.hello:
                seat.process = self.ray.get(reference)
                seat.hello = None
            else:
                seat.flight[reference].take(self.ray)
                del seat.flight[reference]
        except self.ray.exceptions.RayError as error:
            # also what fails outside of training, where that is an answer: an actor whose node dies cannot fetch
            self._lose(seat, error)

    def _lose(self, seat: Seat, error: Exception) -> None:
        """Its node, its process or its answer is gone: ask for another actor, and the others for its parts."""
        self.lost += 1
        with contextlib.suppress(Exception):  # it may be there after all, cut off
            self.ray.kill(seat.actor)
        parts = [part for call in seat.flight.values() for part in call.parts]
        log.warning("an actor is lost, its %d parts go to others: %s", len(parts), type(error).__name__)
        # what it had at hand is to blame, if anything; what lay beside was not begun
        suspects = next(iter(seat.flight.values())).parts if seat.flight else []
        for part in reversed(parts):
            part.lost += part in suspects
            if part.lost < LOSSES:
                part.joins = False  # should it be lost again, it is known which it was
                self.add(part)
                continue
            where = "; ".join(map(str, part.jobs)) or "its first call"
            reason = RuntimeError(
                f"training failed ({where}): {part.lost} actors were lost over it; if memory ran out, give each "
                f"more CPUs (runtime.cpus), or lower runtime.block: {str(error).strip().splitlines()[-1]}"
            )
            part.method = reason
            part.done([reason] * len(part.jobs))
        self.seats[self.seats.index(seat)] = self._seat()

    def forget(self, key: str) -> None:
        """A run is over, its data may go."""
        for seat in self.seats:
            if key in seat.kits and self.ray.is_initialized():  # else the call would connect anew
                seat.kits.remove(key)
                with contextlib.suppress(Exception):
                    seat.actor.forget.remote(key)

    def close(self) -> None:
        for seat in self.seats if self.ray.is_initialized() else ():
            with contextlib.suppress(Exception):
                self.ray.kill(seat.actor)
        self.seats, self.waiting = [], []
