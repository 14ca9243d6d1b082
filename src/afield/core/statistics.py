"""Normalisation statistics (BatchNorm means and variances) beside strategies that act on parameters only.

A delta rule must not touch them: a rate other than 1, momentum, or a delta applied again and again drives
variances negative. The server moves them itself, by convex combinations (which keep variances >= 0), and
only at a step, so that a version never changes once it was handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from afield.core.errors import one_of
from afield.core.table import ClientTable
from afield.core.types import Task

GATHERS = ("buffer", "newest", "running")
RUNNING = 0.1  # weight of one arrival in a running mean


@dataclass(slots=True)
class Gathering:
    """What arrived since the last step. `total` is float64: S is small, and the sum never drifts.

    buffer: the mean of the arrivals since the last step. newest: the mean of the newest per client that
    counts. running: a running mean over arrivals.
    """

    mode: str
    total: Tensor
    count: int
    table: ClientTable | None
    counts: Tensor | None  # newest: which clients count

    @classmethod
    def of(cls, mode: str, statistics: Tensor, clients: int) -> Gathering:
        one_of("gathers", mode, GATHERS)
        newest = mode == "newest"
        start = (
            statistics.double() if mode == "running" else torch.zeros_like(statistics, dtype=torch.float64)
        )
        return cls(
            mode=mode,
            total=start,
            count=0,
            table=ClientTable.like(statistics, clients) if newest else None,
            counts=torch.zeros(clients, dtype=torch.bool) if newest else None,
        )

    def add(self, task: Task, statistics: Tensor) -> None:
        if self.mode == "running":
            self.total.lerp_(statistics.double(), RUNNING)
            self.count = 1
        elif self.table is None or self.counts is None:
            self.total.add_(statistics)
            self.count += 1
        else:
            counted = bool(self.counts[task.client])
            for part, old, write in self.table.exchange(task, 0, statistics):
                if counted:
                    self.total[part].sub_(old)
                self.total[part].add_(write())
            self.counts[task.client] = True
            self.count += not counted

    def lapse(self, clients: Sequence[int]) -> None:
        """These clients' newest statistics stop counting: they are taken out, or the rest is added up anew.

        Whichever are fewer: ACED's whole first cohort may lapse at once, and few are left then.
        """
        if self.table is None or self.counts is None or not clients:
            return
        lapsed = [client for client in dict.fromkeys(clients) if self.counts[client]]
        self.counts[lapsed] = False
        self.count -= len(lapsed)
        if len(lapsed) <= self.count:
            for client in lapsed:
                self.total.sub_(self.table.row(client, self.total.dtype))
        else:
            self.total.zero_()
            for client in self.counts.nonzero().flatten().tolist():
                self.total.add_(self.table.row(client, self.total.dtype))

    def step(self, statistics: Tensor) -> None:
        """Write what was gathered; with nothing gathered the statistics stay."""
        if self.count == 0:
            return
        mean = self.total if self.mode == "running" else self.total / self.count
        statistics.copy_(mean)
        if self.mode == "buffer":
            self.total.zero_()
            self.count = 0
