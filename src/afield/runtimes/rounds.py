"""Synchronous rounds on the same clock: a round lasts as long as its slowest participant.

So time-to-accuracy against asynchronous runs is fair.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from afield.core.types import Receipt, Task
from afield.runtimes.flow import Flow
from afield.runtimes.simulator import CLOSE, THEN, Simulator
from afield.scenarios.schedulers import Bernoulli, Cohort


@dataclass(slots=True)
class RoundFlow(Flow):
    """Participants start together; when the last has arrived (or at the deadline) the round closes."""

    scheduler: Bernoulli | Cohort
    number: int = 0
    members: set[int] = field(default_factory=set)  # task numbers still out

    def begin(self, sim: Simulator) -> None:
        chosen = self.scheduler.participants(sim.scene, self.number, sim.online)
        self.members = {sim.dispatch(client).number for client in chosen}
        if not chosen:
            if not all(sim.gone(client, sim.now) for client in range(sim.scene.clients)):
                sim.push(sim.now + self.scheduler.idle, THEN, CLOSE, self.number)
        elif self.scheduler.deadline is not None:
            sim.push(sim.now + self.scheduler.deadline, THEN, CLOSE, self.number)

    def settled(self, sim: Simulator, task: Task, receipt: Receipt | None) -> None:
        """The last one in ends the round, after every arrival of the same instant."""
        self.members.discard(task.number)
        if not self.members:
            sim.push(sim.now, THEN, CLOSE, self.number)

    def closed(self, sim: Simulator, mark: int) -> None:
        if mark != self.number:
            return  # a deadline of a round that was complete before
        for number in sorted(self.members):
            sim.cancel(number)
        sim.server.close_round()
        self.number += 1
        if not sim.ended:
            self.begin(sim)
