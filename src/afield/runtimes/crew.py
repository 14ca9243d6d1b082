"""The actors of a cluster that a process trains with: who has which tasks, and what becomes of those of the lost."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import time
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from afield.core.errors import InputError
from afield.core.types import Task
from afield.runtimes.actor import Actor, Answer
from afield.runtimes.line import Line, call, wait

log = logging.getLogger("afield")

DESKS = 2  # parts that an actor has: one that it works at, and the next
LOSSES = 3  # so many actors may be lost over one part before it counts as what kills them
GLANCE = 0.01  # seconds between looks at Ray while lines are waited for, and it has something to say
CARE = 5.0  # the same while it has not, unless an actor is lost whose line does not tell
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
    small: bool = False  # goes by line, if there is one
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
class Seat:
    """An actor, or the wish for one: it counts once it has answered."""

    actor: Any
    hello: Any  # reference of its first answer; None once that is there
    process: int = 0
    line: Line | None = None  # for what is small; None where no connection could be made
    serving: Any = None  # reference of the call that answers by line; None: calls are carried out
    # By the reference of the answer; what went by line, where answers come in order, by itself. Oldest first.
    flight: dict[Any, Part] = field(default_factory=dict)
    kits: set[str] = field(default_factory=set)  # of the runs it knows

    @property
    def calls(self) -> Any:
        """The actor, for a call of Ray's: for that it has to leave the line."""
        if self.serving is not None and self.line is not None:
            self.serving = None
            self.line.post(b"")
        return self.actor

    def begin(self, part: Part) -> None:
        """Let the actor work at a part; it does all in this order."""
        self.flight[part] = part
        if part.key not in self.kits:
            self.flight[self.calls.load.remote(part.key, part.kit)] = part
            self.kits.add(part.key)
        if not part.jobs:
            self.flight[self.calls.method.remote(part.key)] = self.flight.pop(part)
            return
        lent: dict[int, tuple[int, Lent]] = {}

        def place(vector: Lent) -> int:
            return lent.setdefault(id(vector), (len(lent), vector))[0]

        places = [
            (place(job.base), None if job.correction is None else place(job.correction)) for job in part.jobs
        ]
        vectors = [vector for _, vector in lent.values()]
        given = part.key, [job.task for job in part.jobs], places, *vectors
        if not part.small or self.line is None:
            self.flight[self.calls.train.remote(*given)] = self.flight.pop(part)
            return
        if self.serving is None:
            self.serving = self.actor.serve.remote()
        self.line.post(pickle.dumps(given, pickle.HIGHEST_PROTOCOL))

    def forget(self, key: str) -> None:
        """Done whenever a run is collected, also amid `begin`: so the actor does not leave the line for it."""
        self.kits.remove(key)
        if self.serving is not None and self.line is not None:
            self.line.post(pickle.dumps((key,)))
        else:
            self.actor.forget.remote(key)

    def handed(self) -> Part | None:
        """Whose answer comes next by line."""
        return next((part for key, part in self.flight.items() if key is part), None)

    def heard(self, ray: Any) -> Any:
        """What came by line; an error where the actor is lost."""
        assert self.line is not None
        try:
            return pickle.loads(self.line.receive())
        except OSError:
            if self.serving is not None:
                with contextlib.suppress(ray.exceptions.GetTimeoutError):
                    ray.get(self.serving, timeout=1.0)  # knows more
            raise


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
        plain = os.environ.get("RAY_USE_TLS", "0") == "0" and os.name == "posix"  # a line is not encrypted
        self._address = self.ray.util.get_node_ip_address if plain else None
        self.waiting: list[Part] = []  # what is due first comes first
        self.lost = 0  # actors, so far
        self.seats = [self._seat() for _ in range(self.count)]

    def _seat(self) -> Seat:
        actor = self._make(self._cpus)
        return Seat(actor, actor.hello.remote(self._address))

    def add(self, part: Part) -> None:
        insort(self.waiting, part, key=lambda one: one.due)

    def hasten(self, part: Part) -> None:
        """Somebody waits for this one."""
        part.due = -math.inf
        if part in self.waiting:
            self.waiting.remove(part)
            self.waiting.insert(0, part)

    def feed(self) -> None:
        """Give every actor a part, and its next one before it asks."""
        while self.waiting and (ready := [seat for seat in self.seats if seat.hello is None]):
            seat = min(ready, key=lambda one: len(one.flight))
            if len(seat.flight) >= DESKS:
                break
            part = self.waiting.pop(0)
            if part.wanted:
                with self._or_lose(seat):
                    seat.begin(part)

    def collect(self, patience: float | None) -> bool:
        """Take what is done, waiting for the first so long (None: for ever), and hand out what is to do."""
        self.feed()
        alone = all(seat.hello is not None for seat in self.seats)
        ready = self._ready(PATIENCE if alone and patience is None else patience)
        if not ready and alone and patience is None:
            raise RuntimeError(
                f"none of {self.count} actors found a place in {PATIENCE:g} s; the cluster has "
                f"{self.ray.available_resources()} to spare: add nodes, or end what holds them"
            )
        for seat, key in ready:
            if seat in self.seats:  # not lost meanwhile
                self._take(seat, key)
        self.feed()
        return bool(ready)

    def _ready(self, patience: float | None) -> list[tuple[Seat, Any]]:
        """Who has an answer: by line, or under which key of the flight."""
        lines = {seat.line: seat for seat in self.seats if seat.line and (seat.line.late or seat.handed())}
        called = {key: seat for seat in self.seats for key, part in seat.flight.items() if key is not part}
        called |= {seat.hello: seat for seat in self.seats if seat.hello is not None}
        glance = GLANCE if called else CARE
        called |= {seat.serving: seat for seat in lines.values() if seat.serving is not None}
        end = math.inf if patience is None else time.monotonic() + patience
        while True:  # nothing waits for both
            limit = max(0.0, min(glance, end - time.monotonic()))
            heard = wait(list(lines), limit) if lines else []
            ready: list[tuple[Seat, Any]] = [(lines[line], line) for line in heard]
            if called and (glance == GLANCE or (limit == glance and not ready)):
                found, _ = self.ray.wait(list(called), num_returns=1, timeout=0.0 if lines else patience)
                ready += [(called[key], key) for key in found]
            if ready or not lines or time.monotonic() >= end:
                return ready

    def _take(self, seat: Seat, key: Any) -> None:
        with self._or_lose(seat):
            if key is seat.hello:
                self._greet(seat)
                return
            if key is seat.line:
                part, found = seat.handed(), seat.heard(self.ray)
            else:
                part, found = seat.flight.get(key), self.ray.get(key)
            if key is seat.serving:
                raise ConnectionError("it does not serve its line any more")
            if found is None:  # its kit is loaded
                seat.flight.pop(key, None)
            elif part is not None:
                seat.flight = {key: other for key, other in seat.flight.items() if other is not part}
                if part.jobs:
                    part.done(found)
                else:
                    part.method = found

    @contextlib.contextmanager
    def _or_lose(self, seat: Seat) -> Iterator[None]:
        """Go on without an actor that is gone; also without one whose line is left amid a message, at Ctrl-C."""
        try:
            yield
        except (self.ray.exceptions.RayError, OSError) as error:
            # also what fails outside of training, where that is an answer: an actor whose node dies cannot fetch
            self._lose(seat, error)
        except BaseException as error:
            self._lose(seat, error)
            raise

    def _greet(self, seat: Seat) -> None:
        seat.process, place = self.ray.get(seat.hello)
        seat.hello = None
        if place is not None:
            try:
                seat.line = call(place)
            except OSError as error:
                log.warning("no line to %s:%d, calls of Ray's have to do: %s", *place[:2], error)

    def _lose(self, seat: Seat, error: BaseException) -> None:
        """Its node, its process or its answer is gone: ask for another actor, and the others for its parts."""
        self.lost += 1
        with contextlib.suppress(Exception):  # it may be there after all, cut off
            self.ray.kill(seat.actor)
        if seat.line is not None:
            seat.line.close()
        parts = list(dict.fromkeys(seat.flight.values()))
        log.warning("an actor is lost, its %d parts go to others: %s", len(parts), type(error).__name__)
        # what it had at hand is to blame, if anything; what lay beside was not begun
        for part in reversed(parts):
            part.lost += part is parts[0]
            if part.lost < LOSSES:
                self.add(part)
                continue
            where = "; ".join(map(str, part.jobs)) or "its first call"
            last = (str(error).strip() or repr(error)).splitlines()[-1]
            reason = RuntimeError(
                f"training failed ({where}): {part.lost} actors were lost over it; if memory ran out, give each "
                f"more CPUs (runtime.cpus), or lower runtime.block: {last}"
            )
            part.method = reason
            part.done([reason] * len(part.jobs))
        self.seats[self.seats.index(seat)] = self._seat()

    def forget(self, key: str) -> None:
        """A run is over, its data may go."""
        for seat in self.seats:
            if key in seat.kits and self.ray.is_initialized():  # else the call would connect anew
                with contextlib.suppress(Exception):
                    seat.forget(key)

    def close(self) -> None:
        for seat in self.seats if self.ray.is_initialized() else ():
            with contextlib.suppress(Exception):
                self.ray.kill(seat.actor)
            if seat.line is not None:
                seat.line.close()
        self.seats, self.waiting = [], []
