"""A strategy of your own: `afield run --strategy examples/own_strategy.py:Clipped`.

FedAsync, except that no single update, however far it has drifted, pulls the model by more than it may.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from afield import Receipt, ServerState, Update


@dataclass(frozen=True)
class Clipped:
    """Mixes each arriving model into the global one; a difference longer than `cap` counts as one of length `cap`."""

    alpha: float = 0.6
    cap: float = 1.0
    uses_base: ClassVar[bool] = False  # `receive` does not need the model that the task started from
    whole: ClassVar[bool] = False  # parameters only: normalisation statistics are averaged by the server

    def init(self, params: Tensor, clients: int) -> ServerState:
        return ServerState(params=params)

    def receive(self, state: ServerState, update: Update) -> Receipt:
        staleness = state.version - update.task.version
        difference = update.model - state.params
        weight = self.alpha * self.cap / max(self.cap, float(difference.norm()))
        state.params.add_(difference, alpha=weight)
        state.version += 1
        return Receipt.of(update, staleness, weight, True, state.version)
