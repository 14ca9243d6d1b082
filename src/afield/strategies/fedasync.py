"""FedAsync (Xie, Koyejo, Gupta 2019)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from afield.core.errors import one_of, within
from afield.core.types import Receipt, ServerState, Update
from afield.strategies.staleness import Constant, Staleness


@dataclass(frozen=True)
class FedAsync:
    """Mixes each arriving model into the global one, less the staler it is.

    Paper: Xie, Koyejo, Gupta: Asynchronous Federated Optimization (2019), algorithm 1.
    Rule: a = alpha * weight(staleness); w <- (1 - a) w + a model.
    When: the simplest rule that never waits, and a good first baseline. Fast clients write over slow ones:
        with unlike clients the model follows whoever came last, so lower alpha or let it fall with staleness.
    Differs: a fresh update has staleness 0 (as in the authors' code), not 1 as in the paper's literal text.
        Their code trains five epochs on one client before it starts, which the paper does not mention; we do
        not.
    Parameters:
        alpha: how much of an arriving model is mixed in
        weight: the staleness function that alpha is multiplied by
        drops: version -> factor that alpha is multiplied by from then on ({800: 0.5} as in their code)
        decay: "sqrt" divides alpha by sqrt(version + 1) (remark 3)
    """

    alpha: float = 0.6
    weight: Staleness = Constant()
    drops: Mapping[int, float] = field(default_factory=dict)
    decay: str = "none"
    uses_base: ClassVar[bool] = False
    linear: ClassVar[str] = "models"
    whole: ClassVar[bool] = True

    def __post_init__(self) -> None:
        within("alpha", self.alpha, 0, 1, above=True)
        one_of("decay", self.decay, ("none", "sqrt"))
        for version, factor in self.drops.items():
            within(f"drops[{version}]", factor, 0, 1)

    def init(self, params: Tensor, clients: int) -> ServerState:
        return ServerState(params=params)

    def receive(self, state: ServerState, update: Update) -> Receipt:
        staleness = state.version - update.task.version
        alpha = self.alpha * self.weight(staleness)
        for version, factor in self.drops.items():
            if state.version >= version:
                alpha *= factor
        if self.decay == "sqrt":
            alpha /= math.sqrt(state.version + 1)
        state.params.lerp_(update.model, alpha)
        state.version += 1
        return Receipt.of(update, staleness, alpha, True, state.version)
