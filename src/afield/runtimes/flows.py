"""Who starts when, where updates are used as they arrive: free-running, by ticks, by sampled staleness."""

from __future__ import annotations

from dataclasses import dataclass, field

from afield.core.errors import InputError
from afield.core.protocols import Dispatcher
from afield.core.types import Receipt, Task
from afield.runtimes.flow import Flow
from afield.runtimes.simulator import CLOSE, FIRST, THEN, WAKE, Simulator
from afield.scenarios.schedulers import SampledStaleness


@dataclass(slots=True)
class Picked(Flow):
    """Who starts is picked by a scheduler among the idle; everyone is idle at first."""

    dispatcher: Dispatcher

    def begin(self, sim: Simulator) -> None:
        for client in range(sim.scene.clients):
            self.dispatcher.ready(client)
        self.fill(sim)

    def fill(self, sim: Simulator) -> None:
        while (client := self.dispatcher.pick(len(sim.flights))) is not None:
            sim.start_or_wait(client)


@dataclass(slots=True)
class FreeFlow(Picked):
    """Whenever a client is idle and the scheduler picks it, it starts."""

    waiting: list[int] = field(default_factory=list)  # told to hold until the version rises

    def freed(self, sim: Simulator, client: int, count: int, hold: bool) -> None:
        if hold and self.dispatcher.holds:
            self.waiting.append(client)
        elif pause := self.dispatcher.rest(client, count):
            sim.push(sim.now + pause, FIRST, WAKE, client)
        else:
            self.dispatcher.ready(client)
        self.fill(sim)

    def woke(self, sim: Simulator, client: int) -> None:
        self.dispatcher.ready(client)
        self.fill(sim)

    def stepped(self, sim: Simulator) -> None:
        for client in self.waiting:
            self.dispatcher.ready(client)
        self.waiting.clear()
        self.fill(sim)


@dataclass(slots=True)
class TickFlow(Picked):
    """Delays in whole server iterations: every due update is received, then one step, then new tasks."""

    waiting: list[int] = field(default_factory=list)  # told to hold until the version rises

    def begin(self, sim: Simulator) -> None:
        Picked.begin(self, sim)
        sim.push(1.0, THEN, CLOSE, 1)

    def freed(self, sim: Simulator, client: int, count: int, hold: bool) -> None:
        if hold and self.dispatcher.holds:
            self.waiting.append(client)
        else:
            self.dispatcher.ready(client)  # starts after this tick's step

    def woke(self, sim: Simulator, client: int) -> None:
        self.dispatcher.ready(client)

    def closed(self, sim: Simulator, mark: int) -> None:
        before = sim.server.version
        if sim.server.close_round() > before:
            for client in self.waiting:
                self.dispatcher.ready(client)
            self.waiting.clear()
        self.fill(sim)
        if sim.lively():
            sim.push(mark + 1.0, THEN, CLOSE, mark + 1)


@dataclass(slots=True)
class SampledFlow(Flow):
    """One client per version, from a version of drawn staleness; one version per unit of time.

    The draws are functions of the version, so at the birth of a version every task that starts from it is known
    and leased at once: the server needs no ring of old versions, and blocks can be trained.
    """

    scheduler: SampledStaleness

    def begin(self, sim: Simulator) -> None:
        self.stepped(sim)

    def stepped(self, sim: Simulator) -> None:
        version = sim.server.version
        for slot in range(version, version + self.scheduler.max + 1):
            client, staleness = self.scheduler.draw(sim.scene, slot)
            if slot - staleness == version:
                sim.dispatch(client, arrival=slot + 1.0)

    def settled(self, sim: Simulator, task: Task, receipt: Receipt | None) -> None:
        if receipt is None or receipt.stepped:
            return
        if not receipt.refused:
            raise InputError(
                "sampled-staleness draws one update per version, but this strategy does not step at every "
                "arrival: use another strategy, or the scheduler 'concurrency'"
            )
        sim.ended = f"refused: {receipt.refused}"  # the next versions' tasks have no base any more
