"""How many events a second the simulator moves where nothing is trained: a million clients, ten thousand in flight.

    python benchmarks/events.py [--quick] [--clients N] [--in-flight N] [--events N] [--parameters N]

An event is one arrival with its receipt and the dispatch that follows, here with exponential delays and the scheduler
`concurrency`. Three simulators take turns, so that whatever else the machine does falls on all alike; a figure is the
median over the turns, in CPU seconds: those of the clock on the wall where nobody else wants the core. Memory is that
of all three together. One thread, as in any run of a small model.
"""

from __future__ import annotations

import argparse
import heapq
import json
import platform
import resource
import statistics
import sys
import time
import timeit
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from afield.core.server import Server
from afield.core.types import LocalResult, OpenTask, Receipt, Scene, Task, Update
from afield.runtimes.flows import FreeFlow
from afield.runtimes.simulate import block_limit
from afield.runtimes.simulator import Simulator
from afield.runtimes.terms import Stop
from afield.scenarios.availability import Always
from afield.scenarios.delays import Exponential
from afield.scenarios.schedulers import Concurrency
from afield.strategies import FedAsync, FedBuff

TURNS = 10
STRATEGIES: dict[str, Any] = {"fedasync": FedAsync(), "fedbuff": FedBuff()}


class Door:
    """Stands in for the server, and does the least: numbers for tasks, a version per update, receipts.

    Left out: leases and versions (who holds which model), the guard and its refusals, and every tensor: no model is
    copied, none is folded. What is left is the clock, the delays, the scheduler, tasks and receipts.
    """

    strategy = None
    keeps_bases = True

    def __init__(self, initial: Tensor) -> None:
        self.initial, self.parameters = initial, initial.numel()
        self.version = self.issued = 0
        self.counts: dict[int, int] = {}

    def checkout(self, client: int, now: float) -> Task:
        count = self.counts.get(client, 0)
        task = OpenTask(self.issued, client, count, self.version, now)
        task.__class__ = Task
        self.counts[client] = count + 1
        self.issued += 1
        return task

    def base(self, task: Task) -> Tensor:
        return self.initial

    def correction(self, task: Task) -> None:
        return None

    def submit(self, update: Update) -> Receipt:
        staleness = self.version - update.task.version
        self.version += 1
        return Receipt.of(update, staleness, 1.0, True, self.version)


class Null:
    """A trainer that gives everyone the same result."""

    method = "null"

    def __init__(self, size: int) -> None:
        self.result = LocalResult(torch.ones(size), 1, 1, 1.0, {"loss": 1.0}, finite=True)

    def train(
        self, tasks: Sequence[Task], bases: Sequence[Tensor], corrections: Sequence[Tensor | None]
    ) -> list[LocalResult]:
        return [self.result] * len(tasks)


def simulator(name: str, clients: int, flight: int, events: int, size: int) -> Simulator:
    scene = Scene(0, [1] * clients)
    initial = torch.zeros(size)
    server: Any = Door(initial) if name == "clock" else Server(STRATEGIES[name], initial, clients)
    return Simulator(
        server,
        Null(size),
        FreeFlow(Concurrency(flight).bind(scene)),
        scene,
        delay=Exponential().bind(scene),
        presence=Always().bind(scene),
        stop=Stop(updates=events),
        block=block_limit(size),
    )


def advance(rows: Iterator[Any], events: int) -> float:
    """The seconds that so many rows take."""
    began = time.process_time()
    for _ in range(events):
        next(rows)
    return time.process_time() - began


def parts(clients: int, flight: int, size: int) -> dict[str, float]:
    """Microseconds of what an event is made of, each alone and warm, the least of many: a floor, not a sum."""
    scene = Scene(0, [1] * clients)
    delay, lottery = Exponential().bind(scene), Concurrency(flight).bind(scene)
    for client in range(clients):
        lottery.ready(client)
    heap = [(delay(client, 0), 1, client, 0, client) for client in range(flight)]
    heapq.heapify(heap)

    def pick() -> None:
        client = lottery.pick(0)
        assert client is not None
        lottery.ready(client)

    def clock() -> None:
        when, order, number, kind, what = heapq.heappop(heap)
        heapq.heappush(heap, (when + delay(what, number), order, number + flight, kind, what))

    def door(server: Any) -> Callable[[], None]:
        result = Null(size).result
        tasks = deque(server.checkout(client, 0.0) for client in range(flight))

        def arrival() -> None:
            task = tasks.popleft()
            server.submit(result.answer(task, 1.0))
            tasks.append(server.checkout(task.client, 1.0))

        return arrival

    wanted: dict[str, Callable[[], object]] = {
        "a delay drawn": lambda: delay(123_456, 1),
        "a client picked": pick,
        f"a delay drawn, a heap of {flight:,} popped and pushed": clock,
        "task, update, receipt": door(Door(torch.zeros(size))),
    }
    for name, strategy in STRATEGIES.items():
        server = Server(strategy, torch.zeros(size), clients)
        wanted[f"task, update, receipt, and what the server does ({name})"] = door(server)
    return {
        name: min(timeit.repeat(part, number=200, repeat=100)) / 200 * 1e6 for name, part in wanted.items()
    }


def peak_gb() -> float:
    """The most memory that this process had at once."""
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a tenth of the events")
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--in-flight", type=int, default=10_000)
    parser.add_argument("--events", type=int, help="timed events of each simulator; 300,000, quick 30,000")
    parser.add_argument("--parameters", type=int, default=2, help="the size of the model")
    chosen = parser.parse_args()
    clients, flight, size = chosen.clients, chosen.in_flight, chosen.parameters
    turn = max(1, (chosen.events or (30_000 if chosen.quick else 300_000)) // TURNS)
    torch.set_num_threads(1)
    print(f"{clients:,} clients, {flight:,} in flight, {size:,} parameters; {TURNS} turns of {turn:,} events")

    names = ("clock", *STRATEGIES)
    runs: dict[str, Iterator[Any]] = {}
    began: dict[str, float] = {}
    for name in names:
        start = time.process_time()
        runs[name] = simulator(name, clients, flight, sys.maxsize, size).rows()
        next(runs[name])  # the first measurement
        next(runs[name])  # the first receipt: everybody is idle by now, and those in flight have started
        began[name] = time.process_time() - start
        advance(runs[name], flight)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(TURNS):
        for name in names:
            seconds[name].append(advance(runs[name], turn) / turn)
    rates = {name: round(1 / statistics.median(seconds[name])) for name in names}
    memory = round(peak_gb(), 3)

    print(f"\n{'':10}{'events/s':>10}{'us/event':>10}{'least':>8}{'most':>8}{'set-up s':>10}")
    for name in names:
        us = sorted(1e6 * value for value in seconds[name])
        print(
            f"{name:10}{rates[name]:>10,}{statistics.median(us):>10.1f}{us[0]:>8.1f}{us[-1]:>8.1f}{began[name]:>10.2f}"
        )
    print("clock: tasks, delays, scheduler and receipts; no server (see Door). The others: the whole loop.")
    print(f"\npeak memory {memory} GB\n\nwhere it goes, us, each alone and warm:")
    for name, us_alone in parts(clients, flight, size).items():
        print(f"{us_alone:8.2f}  {name}")
    print(json.dumps({"benchmark": "events", "events_per_s": rates, "peak_gb": memory}))


if __name__ == "__main__":
    main()
