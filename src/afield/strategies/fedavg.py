"""FedAvg (McMahan et al. 2017), and SGD on the pooled data: the papers' lower and upper baselines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from afield.core.errors import within
from afield.core.table import chunks
from afield.core.types import Receipt, ServerState, Update


@dataclass(slots=True, kw_only=True)
class FedAvgState(ServerState):
    total: Tensor
    weight: float = 0.0


@dataclass(frozen=True)
class FedAvg:
    """Synchronous rounds: the mean delta of the participants.

    McMahan et al. 2017: w <- w + lr sum n_i delta_i / sum n_i (`by_examples = false`: the plain mean). An empty
    round moves nothing; the version rises.
    """

    lr: float = 1.0
    by_examples: bool = True
    uses_base: ClassVar[bool] = True
    linear: ClassVar[str] = "deltas"
    whole: ClassVar[bool] = False
    pace: ClassVar[str] = "round"

    def __post_init__(self) -> None:
        within("lr", self.lr, 0, math.inf, above=True)

    def init(self, params: Tensor, clients: int) -> FedAvgState:
        return FedAvgState(params=params, total=torch.zeros_like(params))

    def receive(self, state: FedAvgState, update: Update) -> Receipt:
        assert update.base is not None
        weight = float(update.examples) if self.by_examples else 1.0
        for part in chunks(state.total):
            total = state.total[part].add_(update.model[part], alpha=weight)
            total.sub_(update.base[part], alpha=weight)
        state.weight += weight
        return Receipt.of(update, state.version - update.task.version, weight, False, state.version)

    def close_round(self, state: FedAvgState) -> None:
        if state.weight:
            state.params.add_(state.total, alpha=self.lr / state.weight)
            state.total.zero_()
            state.weight = 0.0
        state.version += 1


@dataclass(frozen=True)
class SGD:
    """Plain SGD by one client that has everybody's data: what federated training is measured against."""

    uses_base: ClassVar[bool] = False
    whole: ClassVar[bool] = True
    pooled: ClassVar[bool] = True

    def init(self, params: Tensor, clients: int) -> ServerState:
        return ServerState(params=params)

    def receive(self, state: ServerState, update: Update) -> Receipt:
        staleness = state.version - update.task.version
        state.params.copy_(update.model)
        state.version += 1
        return Receipt.of(update, staleness, 1.0, True, state.version)
