"""A strategy and its oracle over the same arrivals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from oracles import Arrival, Paper, Vector

from afield.core.held import HeldDeltas
from afield.core.server import Server
from afield.core.types import Receipt, Task, Update


@dataclass
class Seen:
    """What a drive went through, so that a test can tell that it met what it is about."""

    receipts: list[Receipt]
    empty: int = 0  # rounds or ticks without an arrival
    largest: float = 0.0  # difference between the two models

    @property
    def staleness(self) -> set[int]:
        return {receipt.staleness for receipt in self.receipts}

    def repeated(self, size: int) -> int:
        """Buffers in which some client came twice."""
        clients = [receipt.client for receipt in self.receipts]
        return sum(len(set(clients[k : k + size])) < size for k in range(0, len(clients) - size + 1, size))


def start(size: int, seed: int = 0) -> Vector:
    return np.random.default_rng(seed).normal(size=size)


class Drive:
    """One server, one oracle, made-up clients of very different speed with several tasks each under way.

    A client moves part of the way from its base to a point of its own, with noise; so models stay bounded, and each
    depends on its base. What the client sends goes to both; bases, versions, corrections and models must agree.
    """

    def __init__(
        self, strategy: Any, paper: Paper, seed: int = 0, tolerance: float = 1e-10, distiller: Any = None
    ) -> None:
        self.paper, self.tolerance = paper, tolerance
        initial = torch.from_numpy(paper.w.copy())
        self.server = Server(strategy, initial, paper.N, seed=seed, distiller=distiller)
        self.held = HeldDeltas(len(paper.w)) if getattr(strategy, "client_held", False) else None
        self.draw = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.points = self.numbers.normal(size=(paper.N, len(paper.w)))
        self.speed = [2.0**-i for i in range(paper.N)]  # the last of 6 is 32 times slower than the first
        self.flying: list[Task] = []
        self.seen = Seen([])

    def arrivals(self, count: int) -> Seen:
        """A step (or a buffer's part) per arrival."""
        self._launch()
        for _ in range(count):
            self._arrive()
        return self.seen

    def ticks(self, count: int) -> Seen:
        """0 to 3 arrivals, then the end of the tick."""
        self._launch()
        for _ in range(count):
            due = self.draw.choice([0, 1, 1, 2, 3])
            for _ in range(due):
                self._arrive()
            self._close(due)
        return self.seen

    def rounds(self, count: int, chances: Sequence[float]) -> Seen:
        """Participants by chance, all from the same version, arriving in any order."""
        for _ in range(count):
            chosen = [i for i, chance in enumerate(chances) if self.draw.random() < chance]
            tasks = [self._checkout(i) for i in chosen]
            self.draw.shuffle(tasks)
            for task in tasks:
                self._submit(task)
            self._close(len(tasks))
        return self.seen

    def check(self) -> None:
        gap = float(np.abs(self.server.state.params.numpy() - self.paper.w).max())
        self.seen.largest = max(self.seen.largest, gap)
        assert gap <= self.tolerance, f"the models differ by {gap} at version {self.paper.t}"
        assert self.server.version == self.paper.t

    def _launch(self) -> None:
        self.flying = [self._checkout(i) for i in range(self.paper.N)]
        self.flying += [self._checkout(self.draw.randrange(self.paper.N)) for _ in range(self.paper.N)]

    def _arrive(self) -> None:
        """Some task arrives; its client (if it has no other) or anyone starts, before it is folded or after."""
        weights = [self.speed[task.client] for task in self.flying]
        task = self.draw.choices(self.flying, weights)[0]
        self.flying.remove(task)
        busy = any(other.client == task.client for other in self.flying)
        follower = self.draw.randrange(self.paper.N) if busy else task.client
        before = self.draw.random() < 0.3
        if before:
            self.flying.append(self._checkout(follower))
        self._submit(task)
        if not before:
            self.flying.append(self._checkout(follower))

    def _checkout(self, client: int) -> Task:
        task = self.server.checkout(client, 0.0)
        assert task.version == self.paper.t
        given, due = self.server.correction(task), self.paper.correction(client)
        assert (given is None) == (due is None)
        if given is not None:
            np.testing.assert_allclose(given.numpy(), due, rtol=0, atol=self.tolerance)
        return task

    def _submit(self, task: Task) -> Receipt:
        client, server, paper = task.client, self.server, self.paper
        base, correction = server.base(task), server.correction(task)
        np.testing.assert_allclose(base.numpy(), paper.versions[task.version], rtol=0, atol=self.tolerance)
        way = self.draw.uniform(0.1, 0.6)
        model = base.numpy() + way * (self.points[client] - base.numpy())
        model += self.numbers.normal(scale=0.3, size=len(model))
        steps, rate, examples = self.draw.randint(1, 4), self.draw.uniform(0.2, 0.5), self.draw.randint(1, 9)
        leased = None if correction is None else correction.numpy().copy()
        if leased is not None:
            model -= 0.2 * steps * rate * leased
        sent = torch.from_numpy(model.copy())
        if self.held is not None:
            sent = self.held.prepare(client, sent, base)
        before, staleness = paper.t, paper.t - task.version
        receipt = server.submit(Update(task, sent, None, examples, steps, rate))
        if self.held is not None:
            self.held.commit(client)
        paper.receive(Arrival(client, task.version, model, examples, steps, rate, leased))
        assert receipt.refused == ""
        assert (receipt.staleness, receipt.version) == (staleness, paper.t)
        assert receipt.stepped == (paper.t > before)
        self.seen.receipts.append(receipt)
        self.check()
        return receipt

    def _close(self, arrived: int) -> None:
        self.server.close_round()
        self.paper.close()
        self.seen.empty += not arrived
        self.check()
