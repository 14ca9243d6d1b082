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

    Paper: McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep Networks
        from Decentralized Data (AISTATS 2017).
    Rule: w <- w + lr sum_i n_i delta_i / sum_i n_i over the participants of the round.
    When: clients are about equally fast, or waiting costs nothing: update for update it is hard to beat. A
        round lasts as long as its slowest participant.
    Differs: a server rate `lr` (1 is the paper's average of models). An empty round moves nothing; the
        version rises.
    Parameters:
        lr: the server's rate
        by_examples: whether a client weighs as much as it has examples; else all weigh the same
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
    """Plain SGD by one client that has everybody's data: what federated training is measured against.

    Paper: the upper baseline of the papers' figures.
    Rule: w <- model, which one client trained from w on the pooled data.
    When: to see what the network could learn if the data were in one place.
    Differs: nothing to differ from; momentum and the like start anew in every task, as they do at a client.
    Parameters: none
    """

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
