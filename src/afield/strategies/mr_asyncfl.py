"""MR.AsyncFL: model replacement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from afield.core.errors import one_of, within
from afield.core.table import PRECISIONS, ClientTable
from afield.core.types import Receipt, ServerState, Update


@dataclass(slots=True, kw_only=True)
class MRAsyncFLState(ServerState):
    table: ClientTable
    coefficients: Tensor  # c_i when it was written ...
    written: (
        Tensor  # ... and at which version: now it is c_i gamma^(versions since), so nobody else is touched
    )


@dataclass(frozen=True)
class MRAsyncFL:
    """Replaces a client's old model inside the global one, then mixes the new one in.

    Paper: MR.AsyncFL: Staleness-Aware Aggregation for Asynchronous Federated Learning via Model Replacement
        (under review), eqs 5-12.
    Rule: w <- gamma (w + c_i (model - cache_i)) + (1 - gamma) model, with c_0 = 1/N and every cache starting
        as w_0. Invariants: w = sum_j c_j cache_j and sum_j c_j = 1.
    When: clients come unequally often and their data are unlike: a fast client replaces itself instead of
        everybody else. Needs a model per client on the server.
    Differs: nothing known. The recursion contracts float error by gamma at every arrival, so nothing is ever
        rebuilt. With a table below float32 the rule acts on parameters only and the server averages the
        statistics.
    Parameters:
        gamma: what is kept of the global model; its coefficients fade by this at every arrival
        precision: of the stored models: "float32", "bfloat16" or "int8"
    """

    gamma: float = 0.8
    precision: str = "float32"
    uses_base: ClassVar[bool] = False
    linear: ClassVar[str] = "models"
    gathers: ClassVar[str] = "newest"

    def __post_init__(self) -> None:
        within("gamma", self.gamma, 0, 1, above=True, below=True)
        one_of("precision", self.precision, PRECISIONS)

    @property
    def whole(self) -> bool:
        return self.precision == "float32"

    def init(self, params: Tensor, clients: int) -> MRAsyncFLState:
        return MRAsyncFLState(
            params=params,
            table=ClientTable.like(params, clients, self.precision, initial=params.clone()),
            coefficients=torch.full((clients,), 1.0 / clients, dtype=torch.float64),
            written=torch.zeros(clients, dtype=torch.int64),
        )

    def receive(self, state: MRAsyncFLState, update: Update) -> Receipt:
        client = update.task.client
        staleness = state.version - update.task.version
        kept = self.gamma * self.coefficient(state, client)
        weight = kept + 1.0 - self.gamma
        for part, old, write in state.table.exchange(update.task, state.seed, update.model):
            state.params[part].mul_(self.gamma).sub_(old, alpha=kept).add_(write(), alpha=weight)
        state.version += 1
        state.coefficients[client] = weight
        state.written[client] = state.version
        return Receipt.of(update, staleness, weight, True, state.version)

    def coefficient(self, state: MRAsyncFLState, client: int) -> float:
        """c_i now: the share of client i's cached model in the global one."""
        age = state.version - int(state.written[client])
        return float(state.coefficients[client]) * self.gamma**age
