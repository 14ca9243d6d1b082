"""CA2FL (Wang et al. 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from afield.core.errors import one_of, within
from afield.core.table import PRECISIONS, ClientTable, Wide, chunks
from afield.core.types import Receipt, ServerState, Update


@dataclass(slots=True, kw_only=True)
class CA2FLState(ServerState):
    table: ClientTable
    mean: Tensor  # mean cache at the start of this buffer (float64)
    total: Tensor  # sum of (delta - old cache) over the buffer (float64)
    buffers: Tensor  # the last buffer in which a client was: counts distinct clients
    flushes: int = 0  # buffers so far
    held: int = 0
    distinct: int = 0


@dataclass(frozen=True)
class CA2FL:
    """A buffer whose mean is calibrated by the cached updates of all clients.

    Paper: Wang, Cao, Wu, Chen, Chen: Tackling the Data Heterogeneity in Asynchronous Federated Learning with
        Cached Update Calibration (ICLR 2024).
    Rule: at `size` arrivals w <- w + lr (mean cache at buffer start + sum(delta - old cache) / distinct
        clients); the cache of a client is its newest delta, zeros before it is heard.
    When: FedBuff suits, and clients are unlike: those who are not in the buffer count by what they sent last.
        Needs a vector per client on the server.
    Differs: the cache is replaced at once, so a client that comes twice in one buffer counts once, with its
        newest update; differs from ACE's algorithm a.3, line 5, only there.
    Parameters:
        size: updates per step
        lr: the server's rate
        precision: of the cached deltas: "float32", "bfloat16" or "int8"
        per: "arrival"; "tick": the version rises at every tick, and one that ends with `size` updates or more
            makes a step
        gathers: whose normalisation statistics count at a step, every client's "newest" or those of the
            "buffer" alone, as in the code of the authors' next paper (FADAS)
    """

    size: int = 10
    lr: float = 1.0
    precision: str = "float32"
    per: str = "arrival"
    gathers: str = "newest"
    uses_base: ClassVar[bool] = True
    linear: ClassVar[str] = "deltas"
    whole: ClassVar[bool] = False

    def __post_init__(self) -> None:
        within("size", self.size, 1, math.inf)
        within("lr", self.lr, 0, math.inf, above=True)
        one_of("precision", self.precision, PRECISIONS)
        one_of("per", self.per, ("arrival", "tick"))
        one_of("gathers", self.gathers, ("newest", "buffer"))

    @property
    def pace(self) -> str:
        return self.per

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
        if int(state.buffers[client]) != state.flushes:
            state.buffers[client] = state.flushes
            state.distinct += 1
        state.held += 1
        stepped = state.held == self.size and self.per == "arrival"
        wide = Wide(state.total, state.params)
        for part, old, write in state.table.exchange(update.task, state.seed, update.model, update.base):
            state.total[part].sub_(wide(old)).add_(wide(write()))
            if stepped:
                self._flush(state, part, wide)
        if stepped:
            self._empty(state)
            state.version += 1
        return Receipt.of(update, staleness, 1.0, stepped, state.version)

    def close_round(self, state: CA2FLState) -> bool:
        """The end of a tick; whether it made a step."""
        if full := state.held >= self.size:
            wide = Wide(state.total, state.params)
            for part in chunks(state.total):
                self._flush(state, part, wide)
            self._empty(state)
        state.version += 1
        return full

    def _flush(self, state: CA2FLState, part: slice, wide: Wide) -> None:
        """A chunk of a step."""
        total = state.total[part]
        wide.add(state.params[part], state.mean[part], self.lr)
        wide.add(state.params[part], total, self.lr / state.distinct)
        state.mean[part].add_(total, alpha=1.0 / len(state.table))
        total.zero_()

    def _empty(self, state: CA2FLState) -> None:
        state.held = state.distinct = 0
        state.flushes += 1
