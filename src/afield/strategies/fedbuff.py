"""FedBuff (Nguyen et al. 2022)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from afield.core.errors import one_of, within
from afield.core.table import parts
from afield.core.types import Receipt, ServerState, Update
from afield.strategies.staleness import Constant, Staleness


@dataclass(slots=True, kw_only=True)
class FedBuffState(ServerState):
    total: Tensor
    held: int = 0


@dataclass(frozen=True)
class FedBuff:
    """Steps once per `size` updates, by their mean.

    Paper: Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated Learning with Buffered Asynchronous
        Aggregation (AISTATS 2022), algorithm 1.
    Rule: total += weight(staleness) delta; at `size` arrivals w <- w + lr total / size, total <- 0.
    When: a robust first choice with many clients: a mean of several updates is less noisy than one, and
        nobody is waited for. Slow clients still count less often than fast ones.
    Differs: divided by the size as in the paper, not by the sum of the weights, so a stale buffer makes a
        smaller step (public code also sums, or divides twice). The weight is 1 unless set, as in algorithm 1;
        the paper's experiments use (1 + staleness)^-1/2: `weight = { name = "polynomial", a = 0.5 }`.
    Parameters:
        size: updates per step
        lr: the server's rate
        weight: the staleness function that an update is multiplied by
        per: "arrival"; "tick": the version rises at every tick, and one that ends with `size` updates or more
            makes a step, by all of them
    """

    size: int = 10
    lr: float = 1.0
    weight: Staleness = Constant()
    per: str = "arrival"
    uses_base: ClassVar[bool] = True
    linear: ClassVar[str] = "deltas"
    whole: ClassVar[bool] = False

    def __post_init__(self) -> None:
        within("size", self.size, 1, math.inf)
        within("lr", self.lr, 0, math.inf, above=True)
        one_of("per", self.per, ("arrival", "tick"))

    @property
    def pace(self) -> str:
        return self.per

    def init(self, params: Tensor, clients: int) -> FedBuffState:
        return FedBuffState(params=params, total=torch.zeros_like(params))

    def receive(self, state: FedBuffState, update: Update) -> Receipt:
        assert update.base is not None
        staleness = state.version - update.task.version
        weight = self.weight(staleness)
        state.held += 1
        stepped = state.held == self.size and self.per == "arrival"
        for total, model, base, params in parts(state.total, update.model, update.base, state.params):
            total.add_(model, alpha=weight).sub_(base, alpha=weight)
            if stepped:
                params.add_(total, alpha=self.lr / self.size)
                total.zero_()
        if stepped:
            state.held = 0
            state.version += 1
        return Receipt.of(update, staleness, weight, stepped, state.version)

    def close_round(self, state: FedBuffState) -> bool:
        """The end of a tick; whether it made a step."""
        if full := state.held >= self.size:
            state.params.add_(state.total, alpha=self.lr / state.held)
            state.total.zero_()
            state.held = 0
        state.version += 1
        return full
