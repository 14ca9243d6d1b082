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
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from afield.core.errors import InputError, within
from afield.core.flat import Layout, finite
from afield.core.protocols import Data
from afield.core.types import LocalResult, Task
from afield.runtimes.actor import INLINE, Kit, packed, to_bytes, to_tensor
from afield.runtimes.crew import LOSSES, Crew, Job, Lent, Part
from afield.training.choose import Training, choose
from afield.training.local import Local
from afield.training.pages import keep_pages

log = logging.getLogger("afield")

CREWS: list[tuple[tuple[str, int, int], Crew]] = []

T = TypeVar("T")
S = TypeVar("S")


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


def crew(address: str, actors: int | None, cpus: int, gpus: int) -> Crew:
    """One crew for all runs of this process: starting an actor takes seconds. Ray ends it with the process."""
    for known, one in CREWS:
        if known == (address, cpus, gpus) and actors in (None, one.count):
            return one
    CREWS.append(((address, cpus, gpus), Crew(connected(address), actors, cpus, gpus)))
    return CREWS[-1][1]


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
        keep_pages()  # vectors that come and go with every task
        self.layout = Layout.of(module)
        kit = Kit(copy.deepcopy(module).cpu(), packed(data), local, seed, loss, kind, training)
        self._kit = self.crew.ray.put(kit)
        self._key = self._kit.hex()
        self._lent: Any = WeakTensorKeyDictionary()
        weakref.finalize(self, self.crew.forget, self._key).atexit = False  # Ray is gone by then
        self.method = self._asked(training.method)
        self.singly = self.method in ("loop", "workers")  # tasks are trained one by one
        # Then each is begun as soon as it is dispatched. Else not: stacked tasks are the quicker the more they are.
        self.eager, self.stacked = self.singly, not self.singly

    def train(
        self, tasks: Sequence[Task], bases: Sequence[Tensor], corrections: Sequence[Tensor | None]
    ) -> list[LocalResult]:
        """One result per task, in order."""
        return [result() for result in self.ahead(tasks, bases, corrections)]

    def ahead(
        self,
        tasks: Sequence[Task],
        bases: Sequence[Tensor],
        corrections: Sequence[Tensor | None],
        due: Sequence[float] = (),
    ) -> list[Callable[[], LocalResult]]:
        """Begin to train: a function per task, which waits for its result; what is `due` first is trained first.

        As for workers: bases and corrections must stay as they are until the result is taken, or is of no interest.
        """
        jobs: list[Job] = []
        calls: list[Callable[[], LocalResult]] = []
        for task, base, correction in zip(tasks, bases, corrections, strict=True):
            if base.shape != (self.layout.size,):
                raise InputError(
                    f"a base of shape {tuple(base.shape)} is not a model of {self.layout.size} elements"
                )
            given = None if correction is None else self._lend(correction.to(self.layout.dtype))
            jobs.append(Job(task, self._lend(base), given))
        width = 1 if self.singly else -(-len(jobs) // self.crew.count)
        for start in range(0, len(jobs), max(1, width)):
            when, share = due[start] if due else 0.0, jobs[start : start + width]
            small = self.layout.size * self.layout.dtype.itemsize <= INLINE
            part = Part(self._key, self._kit, share, when, small)
            self.crew.add(part)
            for at, job in enumerate(part.jobs):
                calls.append(functools.partial(self._result, part, job, bases[start + at]))
                job.asker = weakref.ref(calls[-1])
        self.crew.feed()
        return calls

    def _asked(self, wanted: str) -> str:
        """How the actors train: a part without tasks lets the first of them load what it needs, or say why not."""
        part = Part(self._key, self._kit, [])
        self.crew.add(part)
        began = time.perf_counter()
        while not part.method:
            self.crew.collect(None)
        if isinstance(part.method, Exception):
            raise part.method
        log.debug("an actor was ready after %.1f s", time.perf_counter() - began)
        if part.method != wanted and wanted != "workers":
            log.warning("training.method = %r cannot take this model, it trains by %s", wanted, part.method)
        return wanted if wanted == "workers" else part.method

    def _result(self, part: Part, job: Job, base: Tensor) -> LocalResult:
        """What came of a task; the actors go on with others meanwhile."""
        crew = self.crew
        if job.answer is None:
            crew.hasten(part)
            while job.answer is None:
                crew.collect(None)
        else:
            while crew.waiting and crew.collect(0.0):
                pass
        if isinstance(job.answer, Exception):
            raise job.answer
        held, examples, steps, rate, metrics = job.answer
        # a copy: what is kept until its update arrives would fill the object store
        model = to_tensor(held, self.layout.dtype).to(base.device, copy=True)
        return LocalResult(model, examples, steps, rate, metrics, finite(model))

    def _lend(self, vector: Tensor) -> Lent:
        """The vector as parts take it: made once, however many tasks need it. A large one is in the store."""
        state, lent = self._lent.get(vector, (-1, None))
        if state != vector._version:  # vectors are reused: the same tensor may be another model
            held = to_bytes(vector)
            lent = held.tobytes() if held.nbytes <= INLINE else self.crew.ray.put(held)
            self._lent[vector] = vector._version, lent
        return lent


def spread(
    work: Callable[[T], S],
    items: Sequence[T],
    *,
    address: str = "auto",
    cpus: int = 1,
    gpus: int = 0,
    stop: Callable[[], bool] = bool,
) -> Generator[tuple[int, S]]:
    """Do the work on every item somewhere in the cluster: (which, what came of it) in the order of their ends.

    An item whose node or process is lost is begun anew elsewhere. `stop` is asked now and then whether to leave the
    rest.
    """
    ray = connected(address)
    remote = ray.remote(work).options(num_cpus=cpus, num_gpus=gpus, max_retries=LOSSES)
    running = {remote.remote(item): number for number, item in enumerate(items)}
    try:
        while running and not stop():
            ready, _ = ray.wait(list(running), num_returns=1, timeout=0.5)
            for reference in ready:
                yield running.pop(reference), ray.get(reference)
    finally:
        for reference in running:
            with contextlib.suppress(Exception):
                ray.cancel(reference, force=True)
