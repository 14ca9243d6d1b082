"""SCAFFOLD (Karimireddy et al. 2020)."""

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
class ScaffoldState(ServerState):
    delta: Tensor  # sum of the round's deltas
    control: Tensor  # c, fixed during a round
    total: Tensor  # sum of the c_i as stored (float64)
    table: ClientTable
    held: int = 0


@dataclass(frozen=True)
class Scaffold:
    """Rounds with control variates: every local gradient is corrected by c - c_i.

    Paper: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for
        Federated Learning (ICML 2020), option II.
    Rule: c_i <- (base - model) / (steps rate) - (c - c_i), the mean raw gradient of the task; w <- w + lr
        mean delta; c = mean of all c_i, zeros for those not heard.
    When: unlike clients that make many local steps, in rounds: without correction they drift apart. Twice the
        traffic.
    Differs: nothing known. The divisor is the number of local steps that were made, whatever was asked for.
    Parameters:
        lr: the server's rate
        precision: of the clients' control variates: "float32", "bfloat16" or "int8"
    """

    lr: float = 1.0
    precision: str = "float32"
    uses_base: ClassVar[bool] = True
    whole: ClassVar[bool] = False
    pace: ClassVar[str] = "round"

    def __post_init__(self) -> None:
        within("lr", self.lr, 0, math.inf, above=True)
        one_of("precision", self.precision, PRECISIONS)

    def init(self, params: Tensor, clients: int) -> ScaffoldState:
        return ScaffoldState(
            params=params,
            delta=torch.zeros_like(params),
            control=torch.zeros_like(params),
            total=torch.zeros_like(params, dtype=torch.float64),
            table=ClientTable.like(params, clients, self.precision),
        )

    def correction(self, state: ScaffoldState, client: int) -> Tensor:
        return state.control - state.table.row(client, state.control.dtype)

    def receive(self, state: ScaffoldState, update: Update) -> Receipt:
        assert update.base is not None and update.correction is not None
        state.delta.add_(update.model).sub_(update.base)
        state.held += 1
        control = (update.base - update.model).div_(update.steps * update.rate).sub_(update.correction)
        wide = Wide(state.total, state.params)
        for part, old, write in state.table.exchange(update.task, state.seed, control):
            state.total[part].sub_(wide(old)).add_(wide(write()))
        return Receipt.of(update, state.version - update.task.version, self.lr, False, state.version)

    def close_round(self, state: ScaffoldState) -> None:
        if state.held:
            wide = Wide(state.total, state.params)
            for part in chunks(state.params):
                total, delta = state.total[part], state.delta[part]
                state.params[part].add_(delta, alpha=self.lr / state.held)
                state.control[part].copy_(torch.div(total, len(state.table), out=wide.blank(total)))
                delta.zero_()
            state.held = 0
        state.version += 1
