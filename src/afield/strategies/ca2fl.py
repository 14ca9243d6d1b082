"""CA2FL (Wang et al. 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from afield.core.errors import one_of, within
from afield.core.table import PRECISIONS, ClientTable, Wide
from afield.core.types import Receipt, ServerState, Update


@dataclass(slots=True, kw_only=True)
class CA2FLState(ServerState):
    table: ClientTable
    mean: Tensor  # mean cache at the start of this buffer (float64)
    total: Tensor  # sum of (delta - old cache) over the buffer (float64)
    buffers: Tensor  # the last version in whose buffer a client was: counts distinct clients
    held: int = 0
    distinct: int = 0


@dataclass(frozen=True)
class CA2FL:
    """A buffer whose mean is calibrated by the cached updates of all clients.

    Wang et al. 2024: w <- w + lr (mean cache at buffer start + sum(delta - old cache) / distinct clients).
    The cache is replaced at once, so a client that comes twice in one buffer counts once, with its newest
    update; differs from ACE's algorithm a.3, line 5, only there. Unheard clients have a cache of zeros.
    `gathers`: whose normalisation statistics count at a step, every client's newest or those of the "buffer" alone,
    as in the code of the authors' next paper (FADAS).
    """

    size: int = 10
    lr: float = 1.0
    precision: str = "float32"
    gathers: str = "newest"
    uses_base: ClassVar[bool] = True
    whole: ClassVar[bool] = False

    def __post_init__(self) -> None:
        within("size", self.size, 1, math.inf)
        within("lr", self.lr, 0, math.inf, above=True)
        one_of("precision", self.precision, PRECISIONS)
        one_of("gathers", self.gathers, ("newest", "buffer"))

    def init(self, params: Tensor, clients: int) -> CA2FLState:
        return CA2FLState(
            params=params,
            table=ClientTable.like(params, clients, self.precision),
            mean=torch.zeros_like(params, dtype=torch.float64),
            total=torch.zeros_like(params, dtype=torch.float64),
            buffers=torch.full((clients,), -1, dtype=torch.int64),
        )

    def receive(self, state: CA2FLState, update: Update) -> Receipt:
        client = update.task.client
        staleness = state.version - update.task.version
        if int(state.buffers[client]) != state.version:
            state.buffers[client] = state.version
            state.distinct += 1
        state.held += 1
        stepped = state.held == self.size
        wide = Wide(state.total, state.params)
        for part, old, write in state.table.exchange(update.task, state.seed, update.model, update.base):
            total = state.total[part].sub_(wide(old)).add_(wide(write()))
            if stepped:
                wide.add(state.params[part], state.mean[part], self.lr)
                wide.add(state.params[part], total, self.lr / state.distinct)
                state.mean[part].add_(total, alpha=1.0 / len(state.table))
                total.zero_()
        if stepped:
            state.held = state.distinct = 0
            state.version += 1
        return Receipt.of(update, staleness, 1.0, stepped, state.version)
