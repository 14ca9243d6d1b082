"""Local training of large convolutional models on a GPU: every task is begun when it is dispatched.

A GPU's lanes take tasks from one queue, whichever run, learning rate or seed they belong to, so that no lane waits
for the longest task of a block, and none while a server folds or a model is measured. A task's bits do not depend on
the lane or on its company.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self, cast

import torch
from torch import Tensor

from afield.core.types import LocalResult, Task
from afield.training.cuda import Held
from afield.training.deal import Deal
from afield.training.streams import StreamTrainer

STREAMS = 16  # ResNet-18 (batch 50) on an H200, ms per client step: 1.11 with 4, 1.09 with 8, 1.06 with 16
DEPTH = 32  # launches in a lane's queue: half a second of ResNet-18, while the host folds or waits for a measurement
NEXT = 4  # with so few left, a lane takes its next task
PAUSE = 2e-4  # seconds between two looks at the lanes


class Past:
    """A CPU's event: done when it is recorded."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True


@dataclass(eq=False, slots=True)
class Job:
    """A task on its way through a lane. It keeps what the lane reads and writes until that is done."""

    walk: Callable[[int], Iterator[None]] | None  # the launches in a lane, one by one
    wanted: Callable[[], Any] = lambda: None  # a weak reference to who waits for it
    done: Any = None  # the event after its last launch


class Lanes:
    """The streams of one device and the tasks that wait for them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waiting: deque[Job] = deque()
        self._marks: list[deque[Any]] = [deque() for _ in range(STREAMS)]  # events after launches
        self._walks: list[tuple[Job, Iterator[None]] | None] = [None] * STREAMS
        self._leaving: deque[Job] = deque()  # launched to the end
        on = device.type == "cuda"
        self._event: Callable[[], Any] = torch.cuda.Event if on else Past
        stream: Callable[[torch.device], Any] = torch.cuda.Stream
        self.streams = [stream(device) if on else None for _ in range(STREAMS)]
        self.pools: list[Any] = [torch.cuda.graph_pool_handle() if on else None for _ in range(STREAMS)]

    @classmethod
    @cache
    def of(cls, device: torch.device) -> Self:
        """Those of a device, for all that train on it."""
        return cls(device)

    def mark(self) -> Any:
        """An event here and now, on the current stream."""
        event = self._event()
        event.record()
        return event

    def pump(self) -> None:
        """Fill the lanes, a launch each in turns: a queue that is full would keep the others waiting."""
        while sum(self._launch(lane) for lane in range(STREAMS)):
            pass
        while self._leaving and self._leaving[0].done.query():
            self._leaving.popleft().walk = None

    def _launch(self, lane: int) -> bool:
        """One launch in this lane, if it has room for one and anything to do."""
        marks, going = self._marks[lane], self._walks[lane]
        while marks and marks[0].query():
            marks.popleft()
        while self.waiting and self.waiting[0].wanted() is None:  # cancelled
            self.waiting.popleft()
        if len(marks) >= (NEXT if going is None else DEPTH) or (going is None and not self.waiting):
            return False
        with torch.cuda.stream(self.streams[lane]):  # nothing where it is None
            if going is None:
                job = self.waiting.popleft()
                assert job.walk is not None
                going = self._walks[lane] = (job, job.walk(lane))
            job, walk = going
            if next(walk, self) is self:
                job.done, self._walks[lane] = self.mark(), None
                self._leaving.append(job)
            else:
                marks.append(self.mark())
        return True

    def wait(self, job: Job) -> None:
        """Go on until this task is done."""
        self.pump()
        while job.done is None or not job.done.query():
            time.sleep(PAUSE)
            self.pump()

    def drain(self) -> None:
        """Go on until all are done."""
        self.pump()
        while self._leaving or self.waiting or any(self._walks):
            time.sleep(PAUSE)
            self.pump()


class LaneTrainer(StreamTrainer):
    """Clients side by side in the lanes of a device, each from when it is dispatched."""

    eager = True
    capacity = STREAMS

    @property
    def lanes(self) -> Lanes:
        return Lanes.of(self.device)

    def _room_for(self, width: int) -> tuple[Any, Any]:
        return self.lanes.streams[width], self.lanes.pools[width]

    def ahead(
        self,
        tasks: Sequence[Task],
        bases: Sequence[Tensor],
        corrections: Sequence[Tensor | None],
        due: Sequence[float] = (),
    ) -> list[Callable[[], LocalResult]]:
        """Begin to train: a function per task, which waits for its result.

        Bases and corrections must stay as they are until the result is taken, or is of no more interest.
        """
        return cast(LaneTrainer, self.engine).launch(self.deal(tasks, bases, corrections)) if tasks else []

    def run(self, deal: Deal) -> list[LocalResult]:
        return [result() for result in self.launch(deal)]

    def launch(self, deal: Deal) -> list[Callable[[], LocalResult]]:
        """Queue every row of a deal: a function each, which waits for its result."""
        bent = any(correction is not None for correction in deal.corrections)
        shares, _ = self.weights(deal)
        short: list[list[bool]] = ((deal.counts > 0) & (deal.counts < self.batch)).T.tolist()
        steps, lanes = deal.steps, self.lanes
        held = self._ready(len(deal.counts), {s for r, n in enumerate(steps) for s in short[r][:n]}, bent)
        models = [torch.empty_like(base, requires_grad=False) for base in deal.bases]
        begun = lanes.mark()  # bases, picks and memory are there
        found: list[Callable[[], LocalResult]] = []
        for row, model in enumerate(models):
            told = torch.empty(2, dtype=torch.float64, pin_memory=self.device.type == "cuda")
            kinds = short[row][: steps[row]]
            job = Job(partial(self._walk, held, deal, row, kinds, shares, bent, model, told, begun))
            call = partial(self._result, job, deal.sizes[row], len(kinds), model, told)
            job.wanted = weakref.ref(call)
            lanes.waiting.append(job)
            found.append(call)
        lanes.pump()
        return found

    def _ready(self, least: int, kinds: set[bool], bent: bool) -> Held:
        """The tensors for so many steps, and every lane's graphs: made while no lane trains, as a capture does."""
        known = self._held is not None and len(self._held.picks) >= least
        if not known or any((STREAMS - 1, short, bent) not in self._graphs for short in kinds):
            self.lanes.drain()
            self._hold(least)
            with torch.no_grad():
                for lane in range(STREAMS):
                    for short in kinds:
                        self._graph(lane, short, bent)
        return self._hold(least)

    def _walk(
        self,
        held: Held,
        deal: Deal,
        row: int,
        short: list[bool],
        shares: Tensor | None,
        bent: bool,
        model: Tensor,
        told: Tensor,
        begun: Any,
        lane: int,
    ) -> Iterator[None]:
        """A task's launches: `short` says of each step whether its batch is."""
        with torch.no_grad():
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).wait_event(begun)
            self._begin(held, lane, deal, row, shares, bent)
        for lacking in short:
            with torch.no_grad():
                self._graph(lane, lacking, bent)()
            yield
        with torch.no_grad():
            loss = torch.empty_like(held.losses[lane])
            self._end(held, lane, len(short), model, loss)
            low, high = torch.aminmax(model)
            sound = (low.isfinite() & high.isfinite()).double()
            told.copy_(torch.stack([loss, sound]), non_blocking=True)

    def _result(self, job: Job, size: int, steps: int, model: Tensor, told: Tensor) -> LocalResult:
        self.lanes.wait(job)
        loss, sound = told.tolist()
        metrics = {"loss": loss / steps} if steps else {}
        return LocalResult(model, size, steps, self.local.rate, metrics, bool(sound))
