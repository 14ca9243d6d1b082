"""FedAC (Zang et al., AAAI 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from afield.core.errors import one_of, within
from afield.core.table import PRECISIONS, ClientTable
from afield.core.types import Receipt, ServerState, Update


@dataclass(slots=True, kw_only=True)
class FedACState(ServerState):
    total: Tensor  # sum of r_i delta_i
    shift: Tensor  # sum of r_i (new C_i - old C_i)
    first: Tensor
    second: Tensor
    control: Tensor  # C
    table: ClientTable  # C_i
    weight: float = 0.0  # sum of r_i
    held: int = 0


@dataclass(frozen=True)
class FedAC:
    """A buffer weighted by agreement with the server's drift, momentum with a look ahead, control variates.

    Paper: Zang, Xue, Ou, Chu, Du, Long: Efficient Asynchronous Federated Learning with Prospective Momentum
        Aggregation and Fine-Grained Correction (AAAI 2024).
    Rule: r_i = max(cos(w_now - base, delta_i), floor); d = sum r_i delta_i / sum r_i; m <- b1 m + (1-b1) d; v
        <- b2 v + (1-b2) d^2; w <- w + lr (b1 m + (1-b1) d) / (sqrt(v) + eps); C <- C + sum r_i (C_i' - C_i) /
        sum r_i.
    When: stale updates that point elsewhere than the model has moved since do harm, and clients drift: unlike
        data, many local steps. Clients send and receive control variates: twice the traffic.
    Differs: written from the public port, as the paper's text was not at hand; the correction is inside every
        local step and the divisor is in steps (the SCAFFOLD form). C is the port's: its weights sum to 1 in a
        buffer where SCAFFOLD divides by N, so it is N / size times the mean of the C_i or more, and with N far
        above `size` corrections outweigh gradients. A fresh update has no drift to agree with: cosine 0.
    Parameters:
        size: updates per step
        lr: the server's rate
        beta1: of the momentum
        beta2: of the second moment
        eps: added to the root of the second moment, and to the sum of the weights
        floor: the least weight of an update
        precision: of the clients' control variates: "float32", "bfloat16" or "int8"
    """

    size: int = 5
    lr: float = 1e-3
    beta1: float = 0.6
    beta2: float = 0.9
    eps: float = 1e-8
    floor: float = 0.1
    precision: str = "float32"
    uses_base: ClassVar[bool] = True
    whole: ClassVar[bool] = False

    def __post_init__(self) -> None:
        within("size", self.size, 1, math.inf)
        within("lr", self.lr, 0, math.inf, above=True)
        within("beta1", self.beta1, 0, 1, below=True)
        within("beta2", self.beta2, 0, 1, below=True)
        within("eps", self.eps, 0, math.inf, above=True)
        within("floor", self.floor, 0, 1, above=True)
        one_of("precision", self.precision, PRECISIONS)

    def init(self, params: Tensor, clients: int) -> FedACState:
        total, shift, first, second, control = (torch.zeros_like(params) for _ in range(5))
        return FedACState(
            params=params,
            total=total,
            shift=shift,
            first=first,
            second=second,
            control=control,
            table=ClientTable.like(params, clients, self.precision),
        )

    def correction(self, state: FedACState, client: int) -> Tensor:
        return state.control - state.table.row(client, state.control.dtype)

    def receive(self, state: FedACState, update: Update) -> Receipt:
        assert update.base is not None and update.correction is not None
        staleness = state.version - update.task.version
        delta = update.model - update.base
        drift = state.params - update.base
        length = float(drift.norm()) * float(delta.norm())
        cosine = float(torch.dot(drift, delta)) / length if length > 0 else 0.0
        weight = max(cosine, self.floor)
        state.total.add_(delta, alpha=weight)
        # the mean raw gradient of the task: what the steps moved, less what the correction moved
        control = delta.div_(-update.steps * update.rate).sub_(update.correction)
        for part, old, write in state.table.exchange(update.task, state.seed, control):
            state.shift[part].sub_(old, alpha=weight).add_(write(), alpha=weight)
        state.weight += weight
        state.held += 1
        if stepped := state.held == self.size:
            self._step(state)
        return Receipt.of(update, staleness, weight, stepped, state.version)

    def _step(self, state: FedACState) -> None:
        share = 1.0 / (state.weight + self.eps)
        delta = state.total.mul_(share)
        state.first.lerp_(delta, 1.0 - self.beta1)
        state.second.mul_(self.beta2).addcmul_(delta, delta, value=1.0 - self.beta2)
        ahead = state.first.lerp(delta, 1.0 - self.beta1)
        state.params.addcdiv_(ahead, state.second.sqrt().add_(self.eps), value=self.lr)
        state.control.add_(state.shift, alpha=share)
        state.total.zero_()
        state.shift.zero_()
        state.weight = 0.0
        state.held = 0
        state.version += 1
