"""Tasks in what their training depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(slots=True)
class Deal:
    """Tasks in what their training depends on: one row each."""

    bases: list[Tensor]
    corrections: list[Tensor | None]
    picks: Tensor  # [steps, rows, batch]: of the pool; a short batch is filled up with one of its own
    counts: Tensor  # [steps, rows], on the CPU: how many of them count; 0 after the row's last step
    sizes: list[int]  # examples that the row's client has
    keys: list[int]  # of dropout and augmentation

    def __len__(self) -> int:
        return len(self.bases)

    @property
    def steps(self) -> list[int]:
        found: list[int] = (self.counts > 0).sum(dim=0).tolist()
        return found

    def part(self, rows: Sequence[int]) -> Deal:
        """These rows, in this order."""
        if list(rows) == list(range(len(self))):
            return self
        chosen = torch.tensor(rows)
        steps = int((self.counts[:, chosen] > 0).any(dim=1).sum())
        return Deal(
            [self.bases[row] for row in rows],
            [self.corrections[row] for row in rows],
            self.picks[:steps, chosen.to(self.picks.device)],
            self.counts[:steps, chosen],
            [self.sizes[row] for row in rows],
            [self.keys[row] for row in rows],
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
        torch.cat([functional.pad(d.counts, (0, 0, 0, most - len(d.counts))) for d in deals], dim=1),
        [size for deal in deals for size in deal.sizes],
        [key for deal in deals for key in deal.keys],
    )
