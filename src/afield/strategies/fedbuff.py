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

    Nguyen et al. 2022, algorithm 1: total += weight(staleness) delta; at `size` arrivals w <- w + lr total / size.
    Divided by the size, not by the sum of the weights, so a stale buffer makes a smaller step. `per = "tick"`: the
    version rises at every tick, and a tick that ends with `size` updates or more makes a step, by all of them.
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
