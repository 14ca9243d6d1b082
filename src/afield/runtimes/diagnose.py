"""Why the server's steps err, and whose model it is: recorded beside a run, which it leaves as it is.

ACE, section 3.3, splits the error of a step w <- w - eta u into three (F is the plain mean of the clients' objectives
F_i, w the model before the step, base_i the model that client i's newest update started from, or the initial model
where nothing was heard of it):

    u - grad F(w) = (u - E u) + (E u - mean_i grad F_i(base_i)) + (mean_i grad F_i(base_i) - grad F(w))
                         noise                bias                              delay

- u is what the server really did: its move divided by -lr k, where k = local rate x mean number of local steps over
  the clients, so that u is in units of a gradient (a rule with a `factor` has it in its rate, as in the papers).
- E u has each update in the step replaced by what its client would have sent had it used all its data in each of its
  local steps, with the rule's own weights (core/linear.py). With one local step that is the exact conditional
  expectation; with more it follows the noise-free path, and what local steps drift apart is bias, as in the paper.
  So are unequal numbers of local steps: they weigh clients unequally.
- Rounding in a table (int8) is part of the noise, as in the paper's footnote 1.

Left out (None) for rules that are not linear in deltas, for local AdamW, and before the first step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from afield.core.errors import InputError
from afield.core.linear import TaskWeights, columns_for, weights_of
from afield.core.server import Server
from afield.core.types import Receipt, Task, Update
from afield.training.gradients import FullGradients

ROOM = 2**34  # bytes of models that may be kept: one per client, and those of a buffer
TERMS = ("noise", "bias", "delay", "error", "gradient", "remainder")

log = logging.getLogger("afield")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is found at one measurement: numbers, and lists with one entry per client."""

    values: dict[str, Any]
    clients: dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class Held:
    """An update that was received: who sent it, from which base, after how many local steps."""

    task: Task
    base: Tensor
    steps: int


@dataclass(slots=True)
class Step:
    """The newest step of the server."""

    before: Tensor  # the whole model it started from
    after: Tensor
    parts: list[tuple[Held, float]]  # what it was made of
    stale: dict[int, Held]  # each client's newest update by then
    factor: float


@dataclass(slots=True)
class Watch:
    """What is remembered of the updates received."""

    held: dict[int, Held] = field(default_factory=dict)  # by task
    newest: dict[int, Held] = field(default_factory=dict)  # by client
    received: dict[int, int] = field(default_factory=dict)  # how many, by client
    step: Step | None = None


class ObservedServer(Server):
    """A server that takes notes. What it does is what `Server` does, to the bit."""

    def __init__(
        self, strategy: Any, initial: Tensor, clients: int, *, gradients: FullGradients, **options: Any
    ) -> None:
        need = (clients + int(getattr(strategy, "size", 0))) * initial.nbytes
        need += 8 * clients * columns_for(strategy, clients)
        if need > ROOM:
            raise InputError(
                f"measure.diagnose = true keeps a model per client, {need / 2**30:.1f} GiB here, above "
                f"{ROOM / 2**30:.0f}: set it to false, or use fewer clients or a smaller model"
            )
        super().__init__(strategy, initial, clients, **options)
        self.gradients = gradients
        self.watch = Watch()
        self.weights = weights_of(strategy, clients)
        self.initial = initial.clone()
        self._bases: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # one copy per version
        self._terms: tuple[Step | None, dict[str, float | None]] = (None, dict.fromkeys(TERMS))
        self._explained = isinstance(self.weights, TaskWeights) and gradients.local.optimiser == "sgd"
        if not self._explained:
            rule = f"{type(strategy).__name__} with local {gradients.local.optimiser}"
            log.info("%s: noise, bias and delay are left out, they need a rule linear in SGD deltas", rule)

    @property
    def keeps_bases(self) -> bool:
        return True

    def submit(self, update: Update) -> Receipt:
        lease = self.leases.get(update.task.number)
        base = None if lease is None else self._kept(update.task.version, self.base(lease.task))
        before = self.model() if self._explained else None
        receipt = super().submit(update)
        if receipt.refused or base is None:
            return receipt
        task, watch = update.task, self.watch
        watch.newest[task.client] = Held(task, base, update.steps)
        watch.received[task.client] = watch.received.get(task.client, 0) + 1
        if self.weights is not None:
            if isinstance(self.weights, TaskWeights):
                watch.held[task.number] = watch.newest[task.client]
            self.weights.receive(update)
        if receipt.stepped:
            factor = getattr(self.strategy, "factor", lambda staleness: 1.0)(receipt.staleness)
            self._stepped(before, factor)
        return receipt

    def close_round(self) -> int:
        before, version = self.model() if self._explained else None, self.version
        super().close_round()
        if self.weights is not None:
            self.weights.close_round()
        if self.version > version:
            self._stepped(before, 1.0)
        return self.version

    def _kept(self, version: int, base: Tensor) -> Tensor:
        """A copy of a base that outlives its lease."""
        copy = self._bases.get(version)
        if copy is None:
            copy = self._bases[version] = base.clone()
        return copy

    def _stepped(self, before: Tensor | None, factor: float) -> None:
        weights, watch = self.weights, self.watch
        if not isinstance(weights, TaskWeights):
            return
        if before is not None:
            parts = [(watch.held[number], weight) for number, weight in weights.step.items()]
            watch.step = Step(before, self.model(), parts, dict(watch.newest), factor)
        for number in watch.held.keys() - weights.columns.keys():
            del watch.held[number]

    def notes(self) -> dict[str, Any]:
        """What a snapshot keeps beside the server's own."""
        weights = (
            {}
            if self.weights is None
            else {name: getattr(self.weights, name) for name in self.weights.changes}
        )
        return {"watch": self.watch, "weights": weights}

    def take(self, notes: Mapping[str, Any]) -> None:
        """Go on from notes; what they tell of the newest step is found again."""
        self.watch = notes["watch"]
        for name, value in notes["weights"].items():
            setattr(self.weights, name, value)
        step = self.watch.step
        parts = [] if step is None else [*(held for held, _ in step.parts), *step.stale.values()]
        for held in (*self.watch.held.values(), *self.watch.newest.values(), *parts):
            self._bases[held.task.version] = held.base

    # -- what a measurement asks for ---------------------------------------------------------------------------

    def diagnosis(self) -> Diagnosis:
        if self._terms[0] is not self.watch.step and self.watch.step is not None:
            self._terms = (self.watch.step, self._decomposed(self.watch.step))
        drift = self._drift()
        known = [length for length in drift if length is not None]
        values = {**self._terms[1], "drift": sum(known) / len(known) if known else None}
        clients: dict[str, list[Any]] = {
            "drift": drift,
            "received": [self.watch.received.get(client, 0) for client in range(self.clients)],
        }
        if self.weights is not None:
            clients["share"] = self.weights.shares()
        return Diagnosis(values, clients)

    def _drift(self) -> list[float | None]:
        """|w - base| of each client's task in flight (the newest), else of the newest update; None: neither."""
        now, count = self.state.params, self.parameters
        bases = {client: held.base for client, held in self.watch.newest.items()}
        bases |= {lease.task.client: self.base(lease.task) for lease in self.leases.values()}
        # many clients share a base: one norm for each
        lengths = {id(base): float((now - base[:count]).double().norm()) for base in bases.values()}
        return [lengths[id(bases[c])] if c in bases else None for c in range(self.clients)]

    def _decomposed(self, step: Step) -> dict[str, float | None]:
        """The squared norms of noise, bias, delay, the whole error and the true gradient, and what is left over."""
        local, data, count = self.gradients.local, self.gradients.data, len(self.state.params)
        lr = float(getattr(self.strategy, "lr", 1.0)) * step.factor
        if not lr:
            return dict.fromkeys(TERMS)  # an update that is dropped makes no step
        steps = sum(local.work(client, size) for client, size in enumerate(data.sizes)) / self.clients
        move = (step.after[:count].double() - step.before[:count].double()) / -(lr * local.rate * steps)
        expected, old, true = (torch.zeros_like(move) for _ in range(3))
        first = {held.task.client: weight / lr for held, weight in step.parts if _plain(held, step)}
        for client in range(self.clients):
            base = step.stale[client].base if client in step.stale else self.initial
            gradient = self.gradients.at(client, base)
            old.add_(gradient, alpha=1.0 / self.clients)
            expected.add_(gradient, alpha=first.get(client, 0.0) / steps)
            true.add_(self.gradients.at(client, step.before), alpha=1.0 / self.clients)
        for held, weight in step.parts:
            if not _plain(held, step):
                along = self.gradients.along(held.task.client, held.base, held.steps)
                expected.add_(along, alpha=weight / lr * held.steps / steps)
        noise, bias, delay, error = move - expected, expected - old, old - true, move - true
        found = (noise, bias, delay, error, true, error - (noise + bias + delay))
        return {name: float(term.square().sum()) for name, term in zip(TERMS, found, strict=True)}


def _plain(held: Held, step: Step) -> bool:
    """Whether an update's expectation is the gradient at its client's newest base, which is known anyway."""
    newest = step.stale.get(held.task.client)
    return held.steps == 1 and newest is not None and newest.task == held.task
