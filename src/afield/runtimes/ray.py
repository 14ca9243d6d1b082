"""Simulations beyond one machine: the same loop, its tasks trained by the actors of a Ray cluster (extra `ray`).

A `RayTrainer` is a trainer like any other: what it gives depends on (base, correction, data, task) alone, so it does
not matter which actor gives it, nor how often actors are lost on the way. `spread` sends whole runs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from afield.core.errors import InputError, within
from afield.core.flat import Layout, finite
from afield.core.protocols import Data
from afield.core.types import LocalResult, Task
from afield.runtimes.actor import Actor, Answer, Kit, packed, to_bytes, to_tensor
from afield.training.choose import Training, choose
from afield.training.local import Local

log = logging.getLogger("afield")

JOINED = 8  # tasks in one call where they may share one: it costs 1.2 ms, and 0.6 ms for each model of 70 kB
DESKS = 2  # calls that an actor has: one that it works at, and the next
LOSSES = 3  # so many actors may be lost over one part before it counts as what kills them
PATIENCE = 300.0  # seconds without a single actor before a run gives up
INLINE = 100_000  # bytes: a smaller vector travels with its call, as Ray's own small objects do

T = TypeVar("T")
S = TypeVar("S")
Lent = Any  # a vector as bytes, or the reference of one in the object store


def connected(address: str) -> Any:
    """Ray, connected to the cluster."""
    try:
        import ray
    except ImportError:
        raise InputError("Ray is not installed: pip install 'afield[ray]'") from None
    if not ray.is_initialized():
        quiet = {"include_dashboard": False} if address == "local" else {}
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(
                f"runtime.address = {address!r} leads to no Ray cluster ({' '.join(str(error).split())}): "
                "start one with ray start --head, or say address = 'local'"
            ) from error
    return ray


@dataclass(slots=True, eq=False)
class _Job:
    """A task on its way; `answer` comes when it is done."""

    task: Task
    base: Lent
    correction: Lent | None
    answer: Answer | None = None
    asker: Callable[[], object] = bool  # gives who may ask for the answer; None: nobody can any more

    def __str__(self) -> str:
        return f"client {self.task.client}, task {self.task.number}"


@dataclass(slots=True, eq=False)
class _Part:
    """Tasks of one run that go to one actor together. A part without any asks how that run is trained."""

    key: str
    kit: Any
    jobs: list[_Job]
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
class _Call:
    """What an actor was asked for, and the references of its answers."""

    parts: list[_Part]
    references: list[Any]

    @classmethod
    def of(cls, parts: list[_Part], actor: Any) -> _Call:
        first = parts[0]
        jobs = [job for part in parts for job in part.jobs]
        if not jobs:
            return cls(parts, [actor.method.remote(first.key, [first.kit])])
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
        given = (first.key, [first.kit], [job.task for job in jobs], places, *lent)
        if len(jobs) == 1:
            return cls(parts, [actor.train_one.remote(*given)])
        if first.small:  # an answer each: then they come with the reply, not by way of the store
            return cls(parts, actor.train.options(num_returns=len(jobs)).remote(*given))
        return cls(parts, [actor.train.remote(*given)])

    def take(self, ray: Any) -> None:
        """Hand the answers out; raises where they are lost."""
        found = ray.get(self.references)
        if not self.parts[0].jobs:
            self.parts[0].method = found[0]
            return
        answers = iter(found[0] if len(found) == 1 and isinstance(found[0], list) else found)
        for part in self.parts:
            part.done([next(answers) for _ in part.jobs])


@dataclass(slots=True, eq=False)
class _Seat:
    """An actor, or the wish for one: it counts once it has answered."""

    actor: Any
    hello: Any  # reference of its first answer; None once that is there
    process: int = 0
    flight: dict[Any, _Call] = field(default_factory=dict)  # by its first reference


class Crew:
    """The actors of a cluster that this process trains with, and the parts that wait for one.

    A lost actor's parts go to the others at once, ahead of all that wait; in its place another is asked for, which
    takes part as soon as some node has room for it.
    """

    def __init__(self, address: str, actors: int | None = None, cpus: int = 1, gpus: int = 0) -> None:
        self.ray = connected(address)
        kind, each = ("GPU", gpus) if gpus else ("CPU", cpus)
        room = self.ray.cluster_resources().get(kind, 0.0)
        self.count = int(room // each) if actors is None else actors
        if self.count < 1:
            raise InputError(
                f"the Ray cluster has {room:g} {kind}s, and an actor takes {each}: add nodes, or lower runtime.cpus"
            )
        self._make = self.ray.remote(Actor).options(num_cpus=cpus, num_gpus=gpus).remote
        self._cpus = cpus
        self.waiting: deque[_Part] = deque()
        self.lost = 0  # actors, so far
        self.seats = [self._seat() for _ in range(self.count)]

    def _seat(self) -> _Seat:
        actor = self._make(self._cpus, self.ray.get)
        return _Seat(actor, actor.process.remote())

    def free(self) -> bool:
        """Whether nothing waits for an actor, but an actor for something."""
        return not self.waiting and any(
            seat.hello is None and len(seat.flight) < DESKS for seat in self.seats
        )

    def feed(self) -> None:
        """Give every actor a call, and its next one before it asks."""
        ready = [seat for seat in self.seats if seat.hello is None]
        while self.waiting and ready:
            seat = min(ready, key=lambda one: len(one.flight))
            if len(seat.flight) == DESKS:
                break
            if not self.waiting[0].wanted:
                self.waiting.popleft()
                continue
            # the fewer are left, the smaller the calls, so that all actors end at the same time
            room = min(JOINED, len(self.waiting) // (DESKS * len(ready)))
            parts = [self.waiting.popleft()]
            while (
                len(parts) < room
                and parts[0].joins
                and self.waiting[0].joins
                and self.waiting[0].key == parts[0].key
            ):
                parts.append(self.waiting.popleft())
            call = _Call.of(parts, seat.actor)
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

    def _take(self, seat: _Seat, reference: Any) -> None:
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

    def _lose(self, seat: _Seat, error: Exception) -> None:
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
                self.waiting.appendleft(part)
                continue
            where = "; ".join(map(str, part.jobs)) or "its first call"
            reason = RuntimeError(
                f"training failed ({where}): {part.lost} actors were lost over it; if memory ran out, give each "
                f"more CPUs (runtime.cpus), or lower runtime.block: {str(error).strip().splitlines()[-1]}"
            )
            part.method = reason
            part.done([reason] * len(part.jobs))
        self.seats[self.seats.index(seat)] = self._seat()

    def close(self) -> None:
        for seat in self.seats:
            with contextlib.suppress(Exception):
                self.ray.kill(seat.actor)
        self.seats, self.waiting = [], deque()


@functools.cache
def crew(address: str, actors: int | None, cpus: int, gpus: int) -> Crew:
    """One crew for all runs of this process: starting an actor takes seconds. Ray ends it with the process."""
    return Crew(address, actors, cpus, gpus)


class RayTrainer:
    """Trains the tasks of a run by a crew: one at a time where local training is a loop, else in equal parts.

    How a block is parted depends on the number of actors asked for, never on who is there: so bits do not depend on
    losses. `crew` is shared by the runs of a process unless you give one.
    """

    def __init__(
        self,
        module: nn.Module,
        data: Data,
        local: Local,
        seed: int,
        loss: str = "cross-entropy",
        device: str = "cpu",
        training: Training = Training(),
        *,
        address: str = "auto",
        actors: int | None = None,
        cpus: int = 1,
        by: Crew | None = None,
    ) -> None:
        within("cpus", cpus, 1, math.inf)
        kind = torch.device(device).type
        if training.method == "auto":  # two cores: that there is more than one
            training = training.by(choose(module, device, cores=2))
        self.crew = crew(address, actors, cpus, int(kind == "cuda")) if by is None else by
        self.layout = Layout.of(module)
        kit = Kit(copy.deepcopy(module).cpu(), packed(data), local, seed, loss, kind, training)
        self._kit = self.crew.ray.put(kit)
        self._key = self._kit.hex()
        self._lent = WeakTensorKeyDictionary()  # type: ignore[no-untyped-call]
        self.method = self._asked(training.method)
        self.singly = self.method in ("loop", "workers")  # tasks are trained one by one

    def train(
        self, tasks: Sequence[Task], bases: Sequence[Tensor], corrections: Sequence[Tensor | None]
    ) -> list[LocalResult]:
        """One result per task, in order."""
        return [result() for result in self.ahead(tasks, bases, corrections)]

    def ahead(
        self, tasks: Sequence[Task], bases: Sequence[Tensor], corrections: Sequence[Tensor | None]
    ) -> list[Callable[[], LocalResult]]:
        """Begin to train: a function per task, which waits for its result.

        As for workers: bases and corrections must stay as they are until the result is taken, or is of no interest.
        """
        jobs: list[_Job] = []
        calls: list[Callable[[], LocalResult]] = []
        for task, base, correction in zip(tasks, bases, corrections, strict=True):
            if base.shape != (self.layout.size,):
                raise InputError(
                    f"a base of shape {tuple(base.shape)} is not a model of {self.layout.size} elements"
                )
            given = None if correction is None else self._lend(correction.to(self.layout.dtype))
            jobs.append(_Job(task, self._lend(base), given))
        width = 1 if self.singly else -(-len(jobs) // self.crew.count)
        for start in range(0, len(jobs), max(1, width)):
            small = self.layout.size * self.layout.dtype.itemsize <= INLINE
            part = _Part(
                self._key, self._kit, jobs[start : start + width], small, joins=small and self.singly
            )
            self.crew.waiting.append(part)
            for at, job in enumerate(part.jobs):
                calls.append(functools.partial(self._result, part, job, bases[start + at]))
                job.asker = weakref.ref(calls[-1])
        self.crew.feed()
        return calls

    def hungry(self) -> bool:
        """Whether a desk is free: then what was dispatched since the last block may as well be begun.

        Only where tasks are trained one by one: else the width of parts, and so their bits, would depend on the clock.
        """
        return self.singly and self.crew.free()

    def _asked(self, wanted: str) -> str:
        """How the actors train: a part without tasks lets the first of them load what it needs, or say why not."""
        part = _Part(self._key, self._kit, [])
        self.crew.waiting.appendleft(part)
        began = time.perf_counter()
        while not part.method:
            self.crew.collect(None)
        if isinstance(part.method, Exception):
            raise part.method
        log.debug("an actor was ready after %.1f s", time.perf_counter() - began)
        if part.method != wanted and wanted != "workers":
            log.warning("training.method = %r cannot take this model, it trains by %s", wanted, part.method)
        return wanted if wanted == "workers" else part.method

    def _result(self, part: _Part, job: _Job, base: Tensor) -> LocalResult:
        """What came of a task; the actors go on with others meanwhile."""
        crew = self.crew
        if part in crew.waiting:  # the first that is asked for is the first that is needed
            crew.waiting.remove(part)
            crew.waiting.appendleft(part)
        while job.answer is None:
            crew.collect(None)
        while crew.waiting and crew.collect(0.0):
            pass
        if isinstance(job.answer, Exception):
            raise job.answer
        held, *account = job.answer
        # a copy: what is kept until its update arrives would fill the object store
        model = to_tensor(held, self.layout.dtype).to(base.device, copy=True)
        return LocalResult(model, *account, finite=finite(model))

    def _lend(self, vector: Tensor) -> Lent:
        """The vector as calls take it: put into the object store once, however many tasks need it."""
        if vector.nbytes <= INLINE:
            return to_bytes(vector)
        state, reference = self._lent.get(vector, (-1, None))
        if state != vector._version:  # vectors are reused: the same tensor may be another model
            state, reference = vector._version, self.crew.ray.put(to_bytes(vector))
            self._lent[vector] = state, reference
        return reference


def spread(
    work: Callable[[T], S], items: Sequence[T], *, address: str = "auto", cpus: int = 1, gpus: int = 0
) -> Generator[tuple[int, S]]:
    """Do the work on every item somewhere in the cluster: (which, what came of it) in the order of their ends.

    An item whose node or process is lost is begun anew elsewhere.
    """
    ray = connected(address)
    remote = ray.remote(work).options(num_cpus=cpus, num_gpus=gpus, max_retries=LOSSES)
    running = {remote.remote(item): number for number, item in enumerate(items)}
    try:
        while running:
            ready, _ = ray.wait(list(running), num_returns=1)
            result = ray.get(ready[0])
            yield running.pop(ready[0]), result
    finally:
        for reference in running:
            with contextlib.suppress(Exception):
                ray.cancel(reference, force=True)
