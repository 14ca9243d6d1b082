"""What lies beyond one server: regional buffers at a million clients, the vector in shards, and the arithmetic.

    python benchmarks/scale.py [--quick] [--clients N] [--in-flight N] [--parameters N]

Regions are simulated in afield's own simulator, with real (if small) local training: client i has the loss
|w - c_i|^2 / 2, whose local steps have a closed form. Shards are folded by processes of their own. Prints tables, and
ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import heapq
import json
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from afield.core.server import Server
from afield.core.types import LocalResult, Receipt, Scene, ServerState, Task, Update
from afield.runtimes.flows import FreeFlow
from afield.runtimes.rows import Measurement
from afield.runtimes.simulate import block_limit
from afield.runtimes.simulator import Simulator
from afield.runtimes.terms import Measuring, Stop
from afield.scenarios.availability import Always
from afield.scenarios.delays import Exponential
from afield.scenarios.schedulers import Concurrency
from afield.strategies import STRATEGIES, FedBuff

SIZE = 16  # parameters of the simulated model
PULL = 0.4  # how far a task moves its model towards the client's optimum
RATE = 0.2  # the server's
NEAR = 0.02  # squared distance to the optimum that counts as reached, where the start is 16 away


# -- regional buffers -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Message:
    """What a region sends up: the mean of its buffer, and the versions that its updates started from."""

    delta: Tensor
    bases: list[int]


@dataclass(slots=True, kw_only=True)
class RegionalState(ServerState):
    totals: Tensor  # [regions, P]
    bases: list[list[int]]  # per region, of the updates it holds
    total: Tensor  # of the messages at the global server
    held: int = 0
    # under way, a heap: when, which, whose region, and what: a message up, or a version down
    links: list[tuple[float, int, int, Message | int]] = field(default_factory=list)
    sent: int = 0
    staleness: list[int] = field(default_factory=list)  # of every update, when the global server folds it


@dataclass(frozen=True)
class RegionalBuff:
    """FedBuff in two storeys: a region sends the mean of `size` deltas up, the server steps by `fan` of those.

    A message takes `link` each way: what a region sends reaches the server after one, and brings back, after another,
    the version that its clients start from until the next. With link = 0 and one region this is FedBuff.
    """

    regions: int
    size: int
    fan: int
    link: float = 0.0
    lr: float = 1.0
    uses_base: ClassVar[bool] = True
    whole: ClassVar[bool] = False

    def init(self, params: Tensor, clients: int) -> RegionalState:
        return RegionalState(
            params=params,
            totals=torch.zeros(self.regions, len(params)),
            bases=[[] for _ in range(self.regions)],
            total=torch.zeros_like(params),
        )

    def region(self, client: int) -> int:
        return client % self.regions

    def receive(self, state: RegionalState, update: Update) -> Receipt:
        region = self.region(update.task.client)
        total, bases = state.totals[region], state.bases[region]
        total.add_(update.model).sub_(update.base)
        bases.append(update.task.version)
        if len(bases) == self.size:
            message = Message(total / self.size, bases)
            heapq.heappush(state.links, (update.arrived + self.link, state.sent, region, message))
            state.sent += 1
            state.bases[region] = []
            total.zero_()
        return Receipt.of(update, state.version - update.task.version, 1.0, False, state.version)

    def fold(self, state: RegionalState, message: Message) -> None:
        """At the global server."""
        state.staleness += [state.version - base for base in message.bases]
        state.total.add_(message.delta)
        state.held += 1
        if state.held == self.fan:
            state.params.add_(state.total, alpha=self.lr / self.fan)
            state.total.zero_()
            state.held = 0
            state.version += 1


class RegionalServer(Server):
    """Hands out what a client's region has; messages between regions and the global server take their time."""

    def __init__(self, strategy: RegionalBuff, initial: Tensor, clients: int) -> None:
        super().__init__(strategy, initial, clients)
        self.at = [0] * strategy.regions  # the version of each region
        for _ in self.at:
            self.versions.lease(0, 0, self.model)

    def checkout(self, client: int, now: float, version: int | None = None) -> Task:
        self._deliver(now)
        return super().checkout(client, now, self.at[self.strategy.region(client)])

    def submit(self, update: Update) -> Receipt:
        self._deliver(update.arrived)
        receipt = super().submit(update)
        self._deliver(update.arrived)  # where links take no time
        return receipt

    def _deliver(self, now: float) -> None:
        rule, state = self.strategy, self.state
        while state.links and state.links[0][0] <= now:
            when, number, region, message = heapq.heappop(state.links)
            if isinstance(message, Message):
                rule.fold(state, message)
                self.versions.lease(state.version, state.version, self.model)  # sent down: it must stay
                heapq.heappush(state.links, (when + rule.link, number, region, state.version))
            else:
                self.versions.release(self.at[region])
                self.at[region] = message


class Pulls:
    """Local training in closed form: s steps of rate r on |w - c|^2 / 2 end at c + (1 - r)^s (w - c)."""

    method = "closed form"

    def __init__(self, centres: Tensor) -> None:
        self.centres = centres

    def train(
        self, tasks: Sequence[Task], bases: Sequence[Tensor], corrections: Sequence[Tensor | None]
    ) -> list[LocalResult]:
        base = torch.stack(list(bases))
        models = base.lerp(self.centres[[task.client for task in tasks]], PULL)
        return [LocalResult(model, 1, 1, 1.0, finite=True) for model in models]


def clients_of(count: int, regions: int = 100) -> Tensor:
    """Optima: the regions' own, one apart from each other, and around each its clients'."""
    stream = torch.Generator().manual_seed(0)
    homes = 1.0 + torch.randn(regions, SIZE, generator=stream) / 4
    return homes[torch.arange(count) % regions] + torch.randn(count, SIZE, generator=stream)


def simulated(rule: Any, centres: Tensor, flight: int, updates: int) -> dict[str, Any]:
    clients = len(centres)
    scene = Scene(0, [1] * clients)
    initial = torch.zeros(SIZE)
    server = (RegionalServer if isinstance(rule, RegionalBuff) else Server)(rule, initial, clients)
    best = centres.mean(dim=0)
    simulator = Simulator(
        server,
        Pulls(centres),
        FreeFlow(Concurrency(flight).bind(scene)),
        scene,
        delay=Exponential().bind(scene),
        presence=Always().bind(scene),
        stop=Stop(updates=updates),
        evaluator=lambda model: {"distance": float((model - best).square().sum())},
        measuring=Measuring(time=0.5),
        block=block_limit(SIZE),
    )
    began = time.perf_counter()
    at_arrival, path = [], []
    for row in simulator.rows():
        if isinstance(row, Measurement):
            path.append((row.updates, row.values["distance"]))
        else:
            at_arrival.append(row.staleness)
    seconds = time.perf_counter() - began
    found = sorted(getattr(server.state, "staleness", at_arrival))
    late = [distance for count, distance in path if count > 0.75 * updates]
    last_far = max((n for n, (_, distance) in enumerate(path) if distance > NEAR), default=-1)
    return {
        "versions": server.version,
        "staleness": statistics.fmean(found),
        "staleness 95 %": found[int(0.95 * len(found))],
        "most": found[-1],
        "models held": len(server.versions.models),
        "near after": path[last_far + 1][0] if last_far + 1 < len(path) else None,
        "distance": statistics.fmean(late),
        "messages a step": getattr(rule, "fan", getattr(rule, "size", 1)),
        "events/s": updates / seconds,
    }


def regions(clients: int, flight: int, updates: int) -> dict[str, Any]:
    """The same clients, the same 1,000 updates to a step, ever further from the server."""
    centres = clients_of(clients)
    step = flight // 10
    rules: dict[str, Any] = {f"flat, {step} to a step": FedBuff(size=step, lr=RATE)}
    for size, link in ((10, 0.0), (10, 0.1), (10, 0.5), (10, 1.0), (50, 0.1), (100, 0.1)):
        name = f"100 regions of {size}, link {link:g}"
        rules[name] = RegionalBuff(100, size, step // size, link, RATE)
    found = {}
    for name, rule in rules.items():
        found[name] = simulated(rule, centres, flight, updates)
        print(f"{name:30}", {key: _short(value) for key, value in found[name].items()}, flush=True)
    return found


# -- shards ---------------------------------------------------------------------------------------------------------


def same_in_shards(name: str, shards: int = 3, size: int = 999, updates: int = 60) -> bool:
    """Whether servers of a shard each, without a word between them, end with the bits of one that has all."""
    rule: Any = STRATEGIES[name]()
    if hasattr(rule, "fitted"):
        rule = rule.fitted(10, None)
    stream = torch.Generator().manual_seed(1)
    initial = torch.randn(size, generator=stream)
    whole = Server(rule, initial, 10, seed=3)
    parts = [Server(rule, part.clone(), 10, seed=3) for part in initial.chunk(shards)]
    for number in range(updates):
        client = number * 7 % 10
        change = 0.1 * torch.randn(size, generator=stream)
        _answer(whole, client, number, change)
        for server, part in zip(parts, change.chunk(shards), strict=True):
            _answer(server, client, number, part)
    return torch.equal(whole.model(), torch.cat([server.model() for server in parts]))


def _answer(server: Server, client: int, number: int, change: Tensor) -> None:
    task = server.checkout(client, float(number))
    server.submit(Update(task, server.base(task) + change, None, 5 + client, 3, 0.1, number + 1.0))


def elementwise() -> dict[str, bool]:
    """The strategies that step at arrivals, by whether they can be cut into shards."""
    apart = {}
    for name, rule in STRATEGIES.items():
        if getattr(rule(), "pace", "arrival") == "arrival" and not hasattr(rule, "refine"):
            apart[name] = same_in_shards(name)
    return apart


def fold_rate(parameters: int, shards: int, updates: int) -> float:
    """Updates a second, each folded by all shards: a process with one thread per shard."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(shards + 1)
    length = parameters // shards
    workers = [context.Process(target=_folding, args=(length, updates, barrier)) for _ in range(shards)]
    for worker in workers:
        worker.start()
    barrier.wait()
    began = time.perf_counter()
    barrier.wait()
    seconds = time.perf_counter() - began
    for worker in workers:
        worker.join()
    return updates / seconds


def _folding(length: int, updates: int, barrier: Any) -> None:
    torch.set_num_threads(1)
    server = Server(FedBuff(), torch.zeros(length), 10)
    models = [torch.randn(length) for _ in range(3)]
    for at in range(3 + updates):
        if at == 3:
            barrier.wait()
        task = server.checkout(at % 10, float(at))
        server.submit(Update(task, models[at % 3], None, 1, arrived=at + 1.0))
    barrier.wait()


def shards(parameters: int, updates: int, turns: int) -> dict[str, Any]:
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(turns):
        for count, found in rates.items():
            found.append(fold_rate(parameters, count, updates))
    apart = elementwise()
    result = {
        "updates/s": {count: statistics.median(found) for count, found in rates.items()},
        "can be cut": sorted(name for name, same in apart.items() if same),
        "cannot": sorted(name for name, same in apart.items() if not same),
    }
    print("shards", result, flush=True)
    return result


def _short(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--in-flight", type=int, default=10_000)
    parser.add_argument("--updates", type=int, default=200_000)
    parser.add_argument("--parameters", type=int, default=11_181_642)
    options = parser.parse_args()
    torch.set_num_threads(1)
    updates, folds, turns = options.updates, 30, 5
    if options.quick:
        updates, folds, turns = updates // 10, 5, 1
    found = {
        "regions": regions(options.clients, options.in_flight, updates),
        "shards": shards(options.parameters, folds, turns),
    }
    print(json.dumps({"benchmark": "scale", **found}))


if __name__ == "__main__":
    main()
