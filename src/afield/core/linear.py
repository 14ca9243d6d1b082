"""What each update weighs in a step: the strategy itself tells, run a second time on unit vectors.

A rule that is linear in what clients send does the same to every element, whatever its value. So where an update
carries a unit vector in place of a model, the rule's own code gives back the weights: nothing of it is written twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from afield.core.errors import InputError
from afield.core.types import Update

TINY = 1e-9  # below: what rounding left of a weight that is gone
SPARE = 8  # columns beyond those that are known to be needed


def columns_for(strategy: Any, clients: int) -> int:
    """How many updates may count at a time: everyone's newest, those they replace, and a buffer."""
    return 2 * clients + int(getattr(strategy, "size", 0)) + SPARE


class TaskWeights:
    """For rules over deltas: the weight of every update in the newest step, by the number of its task.

    Each update has a column of its own for as long as the state holds anything of it. A client's share of the model
    is its part of the sum of |weight| over all steps so far: how much of all that was applied came from it.
    """

    changes: ClassVar[tuple[str, ...]] = ("state", "free", "columns", "newest", "step", "applied")

    def __init__(self, strategy: Any, clients: int) -> None:
        self.rule = _exact(strategy)
        self.blank = torch.zeros(columns_for(strategy, clients), dtype=torch.float64)
        self.state = self.rule.init(self.blank.clone(), clients)
        self.free = list(range(len(self.blank)))
        self.columns: dict[int, tuple[int, int]] = {}  # by task: column and client
        self.newest: dict[int, int] = {}  # by client: its newest task that was received
        self.step: dict[int, float] = {}
        self.applied = torch.zeros(clients, dtype=torch.float64)

    def receive(self, update: Update) -> None:
        task = update.task
        if not self.free:
            self._free()
        if not self.free:
            raise InputError(
                f"more than {len(self.blank)} updates count at once in {type(self.rule).__name__}, too many for "
                "measure.diagnose: set it to false"
            )
        column = self.free.pop()
        self.columns[task.number] = (column, task.client)
        self.newest[task.client] = task.number
        unit = self.blank.clone()
        unit[column] = 1.0
        self._stepped(_fed(self.rule, self.state, update, unit, self.blank).stepped)

    def close_round(self) -> None:
        version = self.state.version
        self.rule.close_round(self.state)
        self._stepped(self.state.version > version)

    def shares(self) -> list[float]:
        total = float(self.applied.sum())
        return (self.applied / total if total else self.applied).tolist()

    def _stepped(self, stepped: bool) -> None:
        """Read the weights off the model, which is then put back: a rule over deltas never looks at it."""
        if not stepped:
            return
        weights = self.state.params.tolist()
        least = TINY * max(map(abs, weights))
        self.step = {}
        for number, (column, client) in self.columns.items():
            if abs(weights[column]) > least:
                self.step[number] = weights[column]
                self.applied[client] += abs(weights[column])
        self.state.params.zero_()
        self._free()

    def _free(self) -> None:
        """Give back the columns of replaced updates of which the state holds nothing any more."""
        old = [number for number, (_, client) in self.columns.items() if self.newest[client] != number]
        if not old:
            return
        index = torch.tensor([self.columns[number][0] for number in old])
        alive = torch.zeros(len(old), dtype=torch.bool)
        for tensor in _tensors(self.state):
            if tensor.is_floating_point() and tensor.shape == self.blank.shape:
                kept = tensor[index]
                alive |= kept.abs() > TINY
                tensor[index] = torch.where(kept.abs() > TINY, kept, 0.0)
        for number, held in zip(old, alive.tolist(), strict=True):
            if not held:
                self.free.append(self.columns.pop(number)[0])


class ClientWeights:
    """For rules that combine models: the coefficient of each client's models in the global one.

    The global model is sum_i c_i (models of client i) + c (initial model), sum_i c_i + c = 1; a client's share is its
    c_i. With MR.AsyncFL and TWAFL that is the coefficient of its cached model, with FedAsync the sum over its models
    of a times the product of (1 - a) since.
    """

    changes: ClassVar[tuple[str, ...]] = ("state",)

    def __init__(self, strategy: Any, clients: int) -> None:
        self.rule = _exact(strategy)
        self.units = torch.eye(clients + 1, dtype=torch.float64)  # the last one is the initial model's
        self.state = self.rule.init(self.units[-1].clone(), clients)

    def receive(self, update: Update) -> None:
        _fed(self.rule, self.state, update, self.units[update.task.client], None)

    def close_round(self) -> None:
        self.rule.close_round(self.state)

    def shares(self) -> list[float]:
        found: list[float] = self.state.params[:-1].tolist()
        return found


def weights_of(strategy: Any, clients: int) -> TaskWeights | ClientWeights | None:
    """How this strategy's weights are found; None where it is not linear."""
    kind = getattr(strategy, "linear", None)
    if kind is None:
        return None
    return TaskWeights(strategy, clients) if kind == "deltas" else ClientWeights(strategy, clients)


def _exact(strategy: Any) -> Any:
    """The same rule without what only changes how it stores: rounded tables, deltas that clients keep."""
    changes = {"precision": "float32"} if hasattr(strategy, "precision") else {}
    if getattr(strategy, "client_held", False):
        changes["held"] = "server"
    return replace(strategy, **changes)


def _fed(rule: Any, state: Any, update: Update, model: Tensor, base: Tensor | None) -> Any:
    state.lapsed.clear()
    return rule.receive(state, replace(update, model=model, base=base, statistics=None, correction=None))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor of a state."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
