"""MIFA (Gu et al. 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from afield.core.errors import one_of, within
from afield.core.table import PRECISIONS, ClientTable, Wide, advance
from afield.core.types import Receipt, ServerState, Update


@dataclass(slots=True, kw_only=True)
class MIFAState(ServerState):
    table: ClientTable
    total: Tensor  # sum of the caches (float64)


@dataclass(frozen=True)
class MIFA:
    """Rounds: the mean of every client's newest delta, absent clients included.

    Paper: Gu, Huang, Zhang, Huang: Fast Federated Learning in the Presence of Arbitrary Device Unavailability
        (NeurIPS 2021), at a constant rate.
    Rule: cache_i <- delta_i for the participants; w <- w + lr mean_i cache_i.
    When: clients are away for long and nobody knows the probabilities. Needs a vector per client on the
        server.
    Differs: starts from zeros (the `no_wait` variant of the authors' code; the paper waits until all were
        heard). An empty round still moves by the mean cache.
    Parameters:
        lr: the server's rate
        precision: of the cached deltas: "float32", "bfloat16" or "int8"
    """

    lr: float = 1.0
    precision: str = "float32"
    uses_base: ClassVar[bool] = True
    linear: ClassVar[str] = "deltas"
    whole: ClassVar[bool] = False
    gathers: ClassVar[str] = "newest"
    pace: ClassVar[str] = "round"

    def __post_init__(self) -> None:
        within("lr", self.lr, 0, math.inf, above=True)
        one_of("precision", self.precision, PRECISIONS)

    def init(self, params: Tensor, clients: int) -> MIFAState:
        return MIFAState(
            params=params,
            table=ClientTable.like(params, clients, self.precision),
            total=torch.zeros_like(params, dtype=torch.float64),
        )

    def receive(self, state: MIFAState, update: Update) -> Receipt:
        wide = Wide(state.total, state.params)
        for part, old, write in state.table.exchange(update.task, state.seed, update.model, update.base):
            state.total[part].sub_(wide(old)).add_(wide(write()))
        weight = 1.0 / len(state.table)
        return Receipt.of(update, state.version - update.task.version, weight, False, state.version)

    def close_round(self, state: MIFAState) -> None:
        advance(state.params, state.total, self.lr / len(state.table))
        state.version += 1
