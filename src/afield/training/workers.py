"""Many clients at once on a CPU: a process per core, each of one thread that trains one client after another."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import mmap
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from afield.core.errors import InputError, within
from afield.core.flat import Layout, finite
from afield.core.protocols import Data
from afield.core.types import LocalResult, Task
from afield.training.alone import AloneTrainer, alone
from afield.training.local import Local, LoopTrainer
from afield.training.pages import keep_pages

log = logging.getLogger("afield")

REMEDY = 'set method = "loop"'
DESKS = 2  # tasks that a worker has: one that it trains, and the next

# What a process says of a task: examples, steps, rate and metrics. The model is in shared memory.
Account = tuple[int, int, float, dict[str, float]]

# This process's ends of the pipes of all trainers. A forked process inherits them; held there, they would keep a
# worker from seeing that this process is gone.
_ENDS: weakref.WeakSet[Connection] = weakref.WeakSet()


def cores() -> int:
    """How many processes a trainer starts unless told: the cores this process may use, 1 where it may not fork."""
    if _obstacle():
        return 1
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class WorkersTrainer:
    """What `alone` (training/alone.py) gives under one thread, to the bit, whichever process trains a task.

    The processes are forked at the first `train` and stay: they inherit module, data and settings as they are, so
    nothing is pickled and any data set will do, but later changes here do not reach them. As for torch's
    DataLoader, a data set that reads an open file must open it anew in each process. A task alone is handed over
    as well: this process would give other bits with several threads, and never needs autograd this way.
    """

    method: ClassVar[str] = "workers"

    def __init__(
        self,
        module: nn.Module,
        data: Data,
        local: Local,
        seed: int,
        loss: str = "cross-entropy",
        workers: int | None = None,
    ) -> None:
        if obstacle := _obstacle():
            raise InputError(f"{obstacle}: {REMEDY}")
        self._count = cores() if workers is None else workers
        if workers is None and self._count < 2:
            raise InputError(f"{self._count} core is open to this process, and workers need 2: {REMEDY}")
        within("workers", self._count, 1, math.inf)
        self._loop = alone(module, data, local, seed, loss)
        self._workers: list[_Worker] = []
        self._waiting: deque[_Job] = deque()
        self._alone = False  # without workers, where they could not train after all
        self._stopping = weakref.finalize(self, _stop, os.getpid(), self._workers)

    def train(
        self, tasks: Sequence[Task], bases: Sequence[Tensor], corrections: Sequence[Tensor | None]
    ) -> list[LocalResult]:
        """One result per task, in order."""
        return [result() for result in self.ahead(tasks, bases, corrections)]

    def ahead(
        self, tasks: Sequence[Task], bases: Sequence[Tensor], corrections: Sequence[Tensor | None]
    ) -> list[Callable[[], LocalResult]]:
        """Begin to train: a function per task, which waits for its result.

        So nobody idles until the last task of a block is done: with 50 clients in flight under exponential delays,
        blocks of 9 on two cores, small CNNs train 1.1 times as fast. Bases and corrections must stay as they
        are until the result is taken, or is of no more interest.
        """
        if not self._stopping.alive:
            raise RuntimeError("this trainer is closed: make a new one")
        self._check(tasks, bases, corrections)
        if tasks:
            self._start()
        jobs = [_Job(*parts) for parts in zip(tasks, bases, corrections, strict=True)]
        self._waiting.extend(jobs)
        with self._or_close():
            self._feed()
        return [functools.partial(self._result, job) for job in jobs]

    def close(self) -> None:
        """End the processes. Also done when the trainer is garbage, and at exit."""
        self._stopping()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        """Fork the processes, once."""
        if self._workers or self._alone:
            return
        self._alone = isinstance(self._loop, LoopTrainer) and not _autograd_survives()
        if self._alone:
            log.warning(
                "autograd has run in this process and torch sees a GPU, so workers cannot train: the clients take "
                "turns here, with the same results; to have workers, hide the GPU (CUDA_VISIBLE_DEVICES=)"
            )
            return
        while len(self._workers) < self._count:
            self._workers.append(_Worker(self._loop))

    def _check(
        self, tasks: Sequence[Task], bases: Sequence[Tensor], corrections: Sequence[Tensor | None]
    ) -> None:
        """Let the loop refuse, in its own words, what does not fit the shared rows."""
        layout = self._loop.layout
        for task, base, correction in zip(tasks, bases, corrections, strict=True):
            fits = correction is None or correction.shape == (layout.parameters,)
            if base.shape != (layout.size,) or not fits:
                self._loop.train([task], [base], [correction])

    def _result(self, job: _Job) -> LocalResult:
        """What came of a task; the workers go on with others meanwhile."""
        if self._alone:
            return _on_one_thread(self._loop, [job.task], [job.base], [job.correction])[0]
        with self._or_close():
            if job in self._waiting:  # the first that is asked for is the first that is needed
                self._waiting.remove(job)
                self._waiting.appendleft(job)
            while job.answer is None:
                if not self._stopping.alive:
                    raise RuntimeError(f"{job}: its trainer was closed before it was done")
                self._collect(None)
            if self._waiting:
                self._collect(0.0)
        if isinstance(job.answer, Exception):
            raise job.answer
        assert job.model is not None
        return LocalResult(job.model.to(job.base), *job.answer, finite=finite(job.model))

    def _feed(self) -> None:
        """Give every worker a task, and its next one before it asks (waiting for that cost 0.4 ms a task)."""
        while self._waiting and not self._alone:
            worker = min(self._workers, key=lambda one: len(one.flight))
            if len(worker.flight) == DESKS:
                break
            worker.begin(self._waiting.popleft())

    def _collect(self, patience: float | None) -> None:
        """Take what is done, waiting for the first so long (None: for ever), and hand out what is to do."""
        self._feed()
        busy = [worker for worker in self._workers if worker.flight]
        ends = [end for worker in busy for end in (worker.pipe, worker.process.sentinel)]
        ready = set(wait(ends, patience))
        for worker in busy:
            if {worker.pipe, worker.process.sentinel} & ready:
                worker.finish()
        self._feed()

    @contextlib.contextmanager
    def _or_close(self) -> Iterator[None]:
        """Where a worker is lost, or at Ctrl-C, nobody wants what the others are at."""
        try:
            yield
        except BaseException:
            self.close()
            raise


@dataclass(slots=True, eq=False)
class _Job:
    """A task on its way: `answer` and `model` come when it is done."""

    task: Task
    base: Tensor
    correction: Tensor | None
    answer: Account | Exception | None = None
    model: Tensor | None = None

    def __str__(self) -> str:
        return f"client {self.task.client}, task {self.task.number}"


class _Desk:
    """Memory that two processes share for one task: its base, its correction, and the model that comes of it."""

    def __init__(self, layout: Layout) -> None:
        # Anonymous: it has no name to clean up, and goes when both processes are gone.
        memory = mmap.mmap(-1, 3 * layout.size * layout.dtype.itemsize)
        rows = torch.frombuffer(memory, dtype=layout.dtype).view(3, layout.size)
        self.base, self.correction, self.model = rows[0], rows[1, : layout.parameters], rows[2]

    def put(self, job: _Job) -> None:
        self.base.copy_(job.base.detach())
        if job.correction is not None:
            self.correction.copy_(job.correction.detach())


class _Worker:
    """A process and the pipe to it; with two desks, so that the next task lies ready when one ends."""

    def __init__(self, loop: AloneTrainer | LoopTrainer) -> None:
        self._desks = [_Desk(loop.layout) for _ in range(DESKS)]
        self._free = deque(range(DESKS))
        self.flight: deque[tuple[int, _Job]] = deque()  # desk and job, in the order of their answers
        self.pipe, there = multiprocessing.Pipe()
        _ENDS.add(self.pipe)
        self.process = _forked(_work, loop, there, self._desks)
        there.close()

    def begin(self, job: _Job) -> None:
        """Hand over a task, at a desk that is free."""
        desk = self._free.popleft()
        self._desks[desk].put(job)
        self.flight.append((desk, job))
        try:
            self.pipe.send((desk, job.task, job.correction is not None))
        except OSError as error:
            raise self._lost() from error

    def finish(self) -> None:
        """Take the answer to the task that was handed over first."""
        try:
            answer = self.pipe.recv() if self.pipe.poll() else None
        except (EOFError, OSError):
            answer = None
        if answer is None:
            raise self._lost()
        desk, job = self.flight.popleft()
        job.model, job.answer = self._desks[desk].model.clone(), answer
        self._free.append(desk)

    def _lost(self) -> RuntimeError:
        """The error that says how the process ended, and what it had to do."""
        self.process.join(10)
        code = self.process.exitcode
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
        where = "; ".join(str(job) for _, job in self.flight)
        return RuntimeError(
            f"training failed ({where}): worker process {self.process.pid} {how}; "
            f"if memory ran out, train fewer at once, or {REMEDY}"
        )


def _work(loop: AloneTrainer | LoopTrainer, pipe: Connection, desks: Sequence[_Desk]) -> None:
    """What a process does: one task after another, until the other end of its pipe is closed."""
    for end in list(_ENDS):
        end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all: the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not what the parent does with it
    torch.set_num_threads(1)
    keep_pages()
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            number, task, corrected = pipe.recv()
            desk = desks[number]
            answer: Account | Exception
            try:
                result = loop.train([task], [desk.base], [desk.correction if corrected else None])[0]
                desk.model.copy_(result.model)
                answer = (result.examples, result.steps, result.rate, dict(result.metrics))
            except Exception as error:
                error.add_note(traceback.format_exc())  # of its cause too, which does not travel
                answer = error
            pipe.send(answer)


def _on_one_thread(
    loop: AloneTrainer | LoopTrainer,
    tasks: Sequence[Task],
    bases: Sequence[Tensor],
    corrections: Sequence[Tensor | None],
) -> list[LocalResult]:
    """What a worker would give, in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return loop.train(tasks, bases, corrections)
    finally:
        torch.set_num_threads(threads)


def _autograd_survives() -> bool:
    """Whether a forked process can train. Where there is a GPU, torch refuses once autograd has run in this one."""
    if not torch.accelerator.is_available():
        return True
    trial = _forked(_try_autograd)  # nothing else tells
    trial.join()
    return trial.exitcode == 0


def _try_autograd() -> None:
    with contextlib.suppress(RuntimeError):
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
        return
    sys.exit(1)


def _forked(work: Callable[..., None], *arguments: object) -> ForkProcess:
    """A running copy of this process, which ends with it."""
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments, daemon=True)
    with warnings.catch_warnings():
        # Python 3.12 warns where there are threads, as a lock that one of them holds stays locked in the copy.
        # torch's own hold none between two calls, and the copy has one thread: it enters no OpenMP region.
        warnings.filterwarnings("ignore", r".*fork", DeprecationWarning)
        process.start()
    return process


def _stop(owner: int, workers: list[_Worker]) -> None:
    """Kill the processes, which keep nothing; a forked copy of a trainer has none of its own."""
    if os.getpid() != owner:
        return
    for worker in workers:
        worker.process.kill()
        worker.pipe.close()
    for worker in workers:
        worker.process.join()
    workers.clear()


def _obstacle() -> str:
    """Why this process cannot have workers, if so."""
    if "fork" not in multiprocessing.get_all_start_methods() or sys.platform == "darwin":
        return f"worker processes are forked, which {sys.platform} cannot do safely"
    if multiprocessing.current_process().daemon:
        return "this process is itself a daemonic worker (of a multiprocessing pool?) and may start no other"
    return ""
