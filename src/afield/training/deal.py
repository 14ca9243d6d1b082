"""Tasks in what their training depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from afield.core.protocols import Pool
from afield.core.types import Task
from afield.training.draws import shuffled
from afield.training.local import Local, batch_key

Integers = np.ndarray[Any, Any]


@dataclass(slots=True)
class Deal:
    """Tasks in what their training depends on: one row each."""

    bases: list[Tensor]
    corrections: list[Tensor | None]
    picks: Tensor  # [steps, rows, batch]: of the pool; a short batch is filled up with one of its own
    counts: Integers  # [steps, rows]: how many of them count; 0 after the row's last step
    sizes: list[int]  # examples that the row's client has
    keys: list[int]  # of dropout and augmentation

    def __len__(self) -> int:
        return len(self.bases)

    @property
    def steps(self) -> list[int]:
        """By row."""
        found: list[int] = (self.counts > 0).sum(axis=0).tolist()
        return found

    @property
    def widths(self) -> list[int]:
        """Rows at work, by step."""
        found: list[int] = (self.counts > 0).sum(axis=1).tolist()
        return found

    def short(self, batch: int) -> list[list[bool]]:
        """By step and row: whether a batch has fewer than so many."""
        found: list[list[bool]] = ((self.counts > 0) & (self.counts < batch)).tolist()
        return found

    def part(self, rows: Sequence[int]) -> Deal:
        """These rows, in this order."""
        chosen = list(rows)
        if chosen == list(range(len(self))):
            return self
        steps = int((self.counts[:, chosen] > 0).any(axis=1).sum())
        return Deal(
            [self.bases[row] for row in chosen],
            [self.corrections[row] for row in chosen],
            self.picks[:steps, torch.tensor(chosen, device=self.picks.device)],
            self.counts[:steps, chosen],
            [self.sizes[row] for row in chosen],
            [self.keys[row] for row in chosen],
        )


def joined(deals: Sequence[Deal]) -> Deal:
    """Deals over one pool as one."""
    if len(deals) == 1:
        return deals[0]
    most = max(len(deal.counts) for deal in deals)
    return Deal(
        [base for deal in deals for base in deal.bases],
        [correction for deal in deals for correction in deal.corrections],
        torch.cat([functional.pad(d.picks, (0, 0, 0, 0, 0, most - len(d.counts))) for d in deals], dim=1),
        np.concatenate([np.pad(d.counts, ((0, most - len(d.counts)), (0, 0))) for d in deals], axis=1),
        [size for deal in deals for size in deal.sizes],
        [key for deal in deals for key in deal.keys],
    )


class Picks:
    """Which examples the tasks of a run train on: local.batches of many of them at once, on the device."""

    def __init__(self, data: Pool, local: Local, batch: int, seed: int, device: torch.device) -> None:
        self.data, self.local, self.batch, self.seed, self.device = data, local, batch, seed, device
        self.flat = torch.cat(list(data.parts)).to(device)  # every client's examples one after the other
        ends = np.cumsum(data.sizes)
        self.starts: list[int] = (ends - data.sizes).tolist()

    def of(self, tasks: Sequence[Task]) -> tuple[Tensor, Integers]:
        """`picks` and `counts` of a Deal."""
        sizes = [self.data.sizes[task.client] for task in tasks]
        work = [self.local.work(task.client, size) for task, size in zip(tasks, sizes, strict=True)]
        keys = [batch_key(self.seed, task.client, task.count) for task in tasks]
        longest, most = max(sizes), max(work)
        epochs = max(-(-steps // -(-size // self.batch)) for steps, size in zip(work, sizes, strict=True))
        firsts = [self.starts[task.client] for task in tasks]
        if len(set(sizes)) == len(set(work)) == 1 and most * self.batch == epochs * longest:
            # whole epochs of full batches, alike for all: the orders are the batches (a third of the time)
            key, first = torch.from_numpy(np.array([keys, firsts])).to(self.device)
            orders = shuffled(key, epochs, None, longest) + first[:, None, None]
            picks = self.flat.take(orders).view(len(tasks), most, self.batch)
            return picks.transpose(0, 1), np.full((most, len(tasks)), self.batch)
        counts = self._counts(np.array(sizes), np.array(work))
        # the large tensors, on the device
        size, key, first = torch.tensor([sizes, keys, firsts], device=self.device)
        step = torch.arange(most, device=self.device)[:, None]
        per = -(-size // self.batch)
        begin = (step % per * self.batch)[..., None]
        turn = (step // per).clamp(max=epochs - 1)[..., None]
        place = begin + torch.arange(self.batch, device=self.device)
        # a short batch is filled up with its first example
        place = torch.where(place < size[:, None], place, begin)
        row = torch.arange(len(tasks), device=self.device)[:, None]
        orders = shuffled(key, epochs, size, longest)
        chosen = orders.view(-1)[place + (turn + row * epochs) * longest]
        return self.flat[chosen + first[:, None]], counts

    def _counts(self, sizes: Integers, work: Integers) -> Integers:
        step = np.arange(work.max())[:, None]
        begin = step % -(-sizes // self.batch) * self.batch  # where in its epoch a batch begins
        return np.where(step < work, np.minimum(sizes - begin, self.batch), 0)
