"""The only door to the state: checkout a task, submit its update, close a round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afield.core.errors import InputError, within
from afield.core.flat import finite
from afield.core.places import choose, place
from afield.core.protocols import Distiller, Journal, Strategy
from afield.core.statistics import Gathering
from afield.core.types import OpenTask, OpenUpdate, Receipt, ServerState, Task, Update
from afield.core.versions import Versions

REFUSALS = {
    "unknown-client": "no such client",
    "never-leased": "no task of this number, client and version was handed out",
    "closed": "its task was answered or cancelled before: nothing counts twice",
    "wrong-length": "the model has another number of elements than the server's",
    "wrong-type": "the model has another dtype than the server's",
    "not-finite": "the model holds NaN or Inf",
    "no-examples": "an update must come from at least one example",
    "no-steps": "an update must come from at least one step, at a rate that is positive and finite",
    "too-stale": "staler than max_staleness: start again from the newest version",
}


@dataclass(slots=True)
class Lease:
    task: Task
    base: Tensor | None  # None: given back before the update came
    correction: Tensor | None


class Server:
    """Owns the state of one strategy. Not thread-safe: a runtime calls it from one thread.

    `initial` is the whole flat vector; `parameters` says how many of its elements are parameters (the rest
    are normalisation statistics). A refused update changes nothing, its lease included: the runtime decides
    whether to `cancel` the task or to let the client try again.
    """

    def __init__(
        self,
        strategy: Strategy,
        initial: Tensor,
        clients: int,
        *,
        parameters: int | None = None,
        seed: int = 0,
        max_staleness: int | None = None,
        distiller: Distiller | None = None,
        journal: Journal | None = None,
    ) -> None:
        within("clients", clients, 1, math.inf)
        if max_staleness is not None:
            within("max_staleness", max_staleness, 0, math.inf)
        self.strategy = strategy
        self.clients = clients
        self.size = initial.numel()
        self.parameters = self.size if parameters is None or strategy.whole else parameters
        self.max_staleness = max_staleness
        self.distiller = distiller
        self.journal = journal
        self.corrects = hasattr(strategy, "correction")
        self.refines = hasattr(strategy, "refine")
        if self.refines and distiller is None:
            raise InputError(
                f"{type(strategy).__name__} distils: it needs unlabelled data (scenario.data.unlabelled)"
            )
        self.state: ServerState = strategy.init(initial[: self.parameters].clone(), clients)
        self.state.seed = seed
        if self.parameters < self.size:
            self.state.statistics = initial[self.parameters :].clone()
            mode = getattr(strategy, "gathers", "buffer")
            self.state.gathering = Gathering.of(mode, self.state.statistics, clients)
        self.versions = Versions()
        self.leases: dict[int, Lease] = {}
        self.counts: dict[int, int] = {}  # tasks handed out so far, per client
        self.issued = 0
        self._home: tuple[str, Path | None] | None = None

    @property
    def version(self) -> int:
        return self.state.version

    def model(self, out: Tensor | None = None) -> Tensor:
        """A copy of the whole current vector."""
        state = self.state
        if state.statistics is None:  # one call of torch, not three: 1 us instead of 4 for a small model
            return state.params.clone() if out is None else out.copy_(state.params)
        if out is None:
            out = torch.empty(self.size, dtype=state.params.dtype, device=state.params.device)
        out[: self.parameters] = state.params
        out[self.parameters :] = state.statistics
        return out

    def keep_tables(self, kind: str = "auto", folder: Path | None = None, generation: int = 0) -> str:
        """Have the tables in "memory" or on "disk", those yet to be made too; gives which ("auto": core/places.py).

        Without a folder files are temporary. A state that came from a snapshot of this number finds its files there.
        """
        chosen = choose(kind, self.state)
        self._home = (chosen, folder)
        place(self.state, chosen, folder, generation)
        return chosen

    def checkout(self, client: int, now: float, version: int | None = None) -> Task:
        """Hand out a task: leases the newest version (or one still leased), and a correction if there is one."""
        if not 0 <= client < self.clients:
            raise InputError(f"client {client} is unknown: clients are 0 .. {self.clients - 1}")
        newest = self.state.version
        chosen = newest if version is None else version
        base = self.versions.lease(chosen, newest, self.model)
        count = self.counts.get(client, 0)
        task = OpenTask(self.issued, client, count, chosen, now)
        task.__class__ = Task
        correction = None
        if self.corrects:
            correcting: Any = self.strategy
            correction = correcting.correction(self.state, client)
        self.leases[task.number] = Lease(task, base, correction)
        self.counts[client] = count + 1
        self.issued += 1
        return task

    def base(self, task: Task) -> Tensor:
        """The model a leased task starts from; borrowed, not to be written to."""
        base = self.leases[task.number].base
        if base is None:
            raise InputError(f"task {task.number} was trained: its base has been given back")
        return base

    @property
    def keeps_bases(self) -> bool:
        """Whether the base of a task is still read when its update comes."""
        return self.strategy.uses_base

    def trained(self, task: Task) -> None:
        """Its result is at hand, so nobody will ask for its base again: half as many models are held."""
        lease = self.leases[task.number]
        if lease.base is not None and not self.keeps_bases:
            lease.base = None
            self.versions.release(task.version)

    def correction(self, task: Task) -> Tensor | None:
        return self.leases[task.number].correction

    def submit(self, update: Update) -> Receipt:
        """Guard, journal, fold, release."""
        staleness = self.state.version - update.task.version
        if reason := self._refusal(update, staleness):
            return Receipt.of(update, staleness, 0.0, False, self.version, refused=reason)
        if self.journal is not None:
            self.journal.append(update)
        borrowed = self._borrowed(update)
        self.state.lapsed.clear()
        receipt = self.strategy.receive(self.state, borrowed)
        if borrowed.statistics is not None:
            self._move_statistics(update.task, borrowed.statistics, receipt.stepped)
        if self.refines:
            refining: Any = self.strategy
            refining.refine(self.state, borrowed, self.distiller)
            if self._home is not None:
                place(self.state, *self._home)  # its table is made at the first update
        self._release(update.task)
        return receipt

    def close_round(self) -> int:
        """End a round or tick of a strategy that steps then; gives the new version."""
        closing: Any = self.strategy
        before, state = self.version, self.state
        state.lapsed.clear()
        stepped = closing.close_round(state) is not False  # False: a tick that filled no buffer
        if self.version > before and state.gathering is not None and state.statistics is not None:
            state.gathering.lapse(state.lapsed)
            if stepped:
                state.gathering.step(state.statistics)
        return self.version

    def cancel(self, task: Task) -> None:
        """Take a task back: its update will never be used."""
        self._release(task)

    def refusal(self, update: Update) -> str:
        """Why this update would be refused now; empty where it would be accepted."""
        return self._refusal(update, self.state.version - update.task.version)

    def picture(self) -> dict[str, Any]:
        """Everything that changes: borrowed, and valid until the next call."""
        versions = Versions(self.versions.models, self.versions.leases)  # spare vectors hold nothing
        return {
            "state": self.state,
            "versions": versions,
            "leases": self.leases,
            "counts": self.counts,
            "issued": self.issued,
        }

    def restore(self, picture: Mapping[str, Any]) -> None:
        """Continue from what `picture` gave; the picture is the server's own from here on."""
        mine, theirs = self.state, picture["state"]
        for what, one, two in (
            ("a state", type(mine).__name__, type(theirs).__name__),
            ("parameters", tuple(mine.params.shape), tuple(theirs.params.shape)),
            ("a type", mine.params.dtype, theirs.params.dtype),
            ("normalisation statistics", mine.statistics is None, theirs.statistics is None),
        ):
            if one != two:
                raise InputError(
                    f"the stored server has {what} of {two}, this one of {one}: "
                    "give the strategy and the model that it was begun with"
                )
        self.state = theirs
        self.versions = picture["versions"]
        self.leases = picture["leases"]
        self.counts = picture["counts"]
        self.issued = picture["issued"]

    def _refusal(self, update: Update, staleness: int) -> str:
        task = update.task
        if not 0 <= task.client < self.clients:
            return "unknown-client"
        lease = self.leases.get(task.number)
        if lease is None:
            return "closed" if 0 <= task.number < self.issued else "never-leased"
        if lease.task is not task and lease.task != task:  # a simulation hands back the very object
            return "never-leased"
        if update.model.shape != (self.size,):
            return "wrong-length"
        if update.model.dtype != self.state.params.dtype:
            return "wrong-type"
        if update.examples < 1:
            return "no-examples"
        if update.steps < 1 or not 0 < update.rate < math.inf:
            return "no-steps"  # control variates divide by both
        if self.max_staleness is not None and staleness > self.max_staleness:
            return "too-stale"
        known = update.finite
        return "" if (finite(update.model) if known is None else known) else "not-finite"

    def _borrowed(self, update: Update) -> Update:
        """The update as the strategy sees it: its own part of the vectors, and what was leased with the task."""
        lease = self.leases[update.task.number]
        model, statistics = update.model, None
        base = lease.base if self.strategy.uses_base else None
        if self.parameters < self.size:  # a slice costs 1.5 us, even of the whole
            model, statistics = model[: self.parameters], model[self.parameters :]
            base = None if base is None else base[: self.parameters]
        borrowed = OpenUpdate(
            update.task,
            model,
            base,
            update.examples,
            update.steps,
            update.rate,
            update.arrived,
            update.metrics,
            statistics,
            lease.correction,
            update.finite,
        )
        borrowed.__class__ = Update
        return borrowed

    def _move_statistics(self, task: Task, fresh: Tensor, stepped: bool) -> None:
        state = self.state
        assert state.gathering is not None and state.statistics is not None
        state.gathering.lapse(state.lapsed)
        later = task.client in state.lapsed  # counts from the next step on, as its model does
        if not later:
            state.gathering.add(task, fresh)
        if stepped:
            state.gathering.step(state.statistics)
        if later:
            state.gathering.add(task, fresh)

    def _release(self, task: Task) -> None:
        if self.leases.pop(task.number).base is not None:
            self.versions.release(task.version)
