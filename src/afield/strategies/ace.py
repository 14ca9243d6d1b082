"""ACE and ACED: all-client engagement."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from afield.core.errors import one_of, within
from afield.core.table import PRECISIONS, ClientTable, Exchange, Wide, advance, chunks
from afield.core.types import Receipt, ServerState, Update


@dataclass(slots=True, kw_only=True)
class ACEState(ServerState):
    total: Tensor  # sum over clients of their newest delta as stored (float64: never drifts, never rebuilt)
    table: ClientTable | None  # None where clients hold their own
    heard: Tensor
    waiting: int  # clients not yet heard


@dataclass(frozen=True)
class ACE:
    """Steps at every arrival by the mean of the newest delta of all clients.

    Paper: Mitigating Participation Imbalance Bias in Asynchronous Federated Learning Under Client
        Heterogeneity (ACE; under review), algorithm 1 in its incremental form, and a.5.
    Rule: u_i <- delta; w <- w + lr mean_i u_i. With `warmup = "wait"` no step until all N were heard once
        (the paper's initialisation).
    When: unlike clients of unlike speed: everyone weighs 1/N at every step, however rarely it comes, so fast
        clients do not bias the model. Everyone must be heard before the first step, and very old deltas still
        count: see aced.
    Differs: a client sends the delta of its task where the paper sends gradients; lr is their rate over
        (local steps times local rate). The sum is float64 and adds and subtracts what is stored, so it never
        drifts and is never rebuilt.
    Parameters:
        lr: the server's rate
        warmup: "wait" for all clients, or "zeros": unheard clients count as 0
        per: "arrival"; "tick": one step per tick, after all its arrivals
        held: "server" keeps every client's newest delta; "client": the client keeps it and sends the
            difference (algorithm a.5), the server keeps O(P)
        precision: of the stored deltas: "float32", "bfloat16" or "int8"
    """

    lr: float = 1.0
    warmup: str = "wait"
    per: str = "arrival"
    held: str = "server"
    precision: str = "float32"
    uses_base: ClassVar[bool] = True
    linear: ClassVar[str] = "deltas"
    whole: ClassVar[bool] = False
    gathers: ClassVar[str] = "newest"

    def __post_init__(self) -> None:
        within("lr", self.lr, 0, math.inf, above=True)
        one_of("warmup", self.warmup, ("wait", "zeros"))
        one_of("per", self.per, ("arrival", "tick"))
        one_of("held", self.held, ("server", "client"))
        one_of("precision", self.precision, PRECISIONS)

    @property
    def pace(self) -> str:
        return self.per

    @property
    def client_held(self) -> bool:
        return self.held == "client"

    def init(self, params: Tensor, clients: int) -> ACEState:
        return ACEState(
            params=params,
            total=torch.zeros_like(params, dtype=torch.float64),
            table=None if self.client_held else ClientTable.like(params, clients, self.precision),
            heard=torch.zeros(clients, dtype=torch.bool),
            waiting=clients,
        )

    def receive(self, state: ACEState, update: Update) -> Receipt:
        staleness = state.version - update.task.version
        state.waiting -= not state.heard[update.task.client]
        state.heard[update.task.client] = True
        ready = self._ready(state)
        stepped = ready and self.per == "arrival"
        weight = self.lr / len(state.heard)
        wide = Wide(state.total, state.params)
        for part, old, write in self._exchange(state, update):
            total = state.total[part].sub_(wide(old)).add_(wide(write()))
            if stepped:
                wide.add(state.params[part], total, weight)
        state.version += stepped
        return Receipt.of(update, staleness, weight, stepped, state.version, hold=not ready)

    def close_round(self, state: ACEState) -> None:
        """The end of a tick: a step even if nobody arrived, as long as everyone was heard."""
        if self._ready(state):
            advance(state.params, state.total, self.lr / len(state.heard))
            state.version += 1

    def _ready(self, state: ACEState) -> bool:
        return state.waiting == 0 or self.warmup == "zeros"

    def _exchange(self, state: ACEState, update: Update) -> Iterator[Exchange]:
        """What leaves the sum and what enters it, a chunk at a time."""
        if state.table is not None:
            return state.table.exchange(update.task, state.seed, update.model, update.base)
        model, base = update.model, update.base
        assert base is not None
        return ((part, base[part], partial(model.__getitem__, part)) for part in chunks(model))


@dataclass(slots=True, kw_only=True)
class ACEDState(ServerState):
    total: Tensor  # sum of the newest deltas of the active clients (float64)
    first: Tensor  # the part of it from clients not heard again since the warm-up: they expire all at once
    table: ClientTable
    stamps: Tensor  # 0: never heard
    count: int = 0  # of active clients
    cohort: int = 0  # of those not heard again since the warm-up
    recent: deque[int] = field(default_factory=deque)  # who arrived with stamp 2, 3, ..., not yet expired
    oldest: int = 2  # the stamp of recent[0]
    # the same by ticks, where several arrive with one stamp
    stamped: deque[tuple[int, int]] = field(default_factory=deque)  # (stamp, client), not yet expired
    arrived: dict[int, None] = field(default_factory=dict)  # in this tick


@dataclass(frozen=True)
class ACED:
    """ACE over the clients heard within the last `max_delay` versions.

    Paper: Mitigating Participation Imbalance Bias in Asynchronous Federated Learning Under Client
        Heterogeneity (ACE; under review), algorithm a.1.
    Rule: after ACE's warm-up, w <- w + lr mean of u_i over the clients with version - stamp_i <= max_delay;
        stamp_i is 1 at first and the new version after each of its arrivals.
    When: ACE suits, but some clients go silent for long or for good: their last delta is not applied for
        ever.
    Differs: a client that was out counts again from the step after its arrival. With nobody active the
        version rises and w stays. One client expires per version at the most (a queue), except those never
        heard again after the warm-up: one vector holds their sum. With `per = "tick"` a row leaves the sum by
        itself, at most once per arrival.
    Parameters:
        lr: the server's rate
        max_delay: versions (ticks, where `per` says so) after which a client that was not heard no longer
            counts
        precision: of the stored deltas: "float32", "bfloat16" or "int8"
        per: "arrival"; "tick": one step per tick, after all its arrivals
    """

    lr: float = 1.0
    max_delay: float = 10
    precision: str = "float32"
    per: str = "arrival"
    uses_base: ClassVar[bool] = True
    linear: ClassVar[str] = "deltas"
    whole: ClassVar[bool] = False
    gathers: ClassVar[str] = "newest"

    def __post_init__(self) -> None:
        within("lr", self.lr, 0, math.inf, above=True)
        within("max_delay", self.max_delay, 0, math.inf)
        one_of("precision", self.precision, PRECISIONS)
        one_of("per", self.per, ("arrival", "tick"))

    @property
    def pace(self) -> str:
        return self.per

    def init(self, params: Tensor, clients: int) -> ACEDState:
        return ACEDState(
            params=params,
            total=torch.zeros_like(params, dtype=torch.float64),
            first=torch.zeros_like(params, dtype=torch.float64),
            table=ClientTable.like(params, clients, self.precision),
            stamps=torch.zeros(clients, dtype=torch.int64),
        )

    def receive(self, state: ACEDState, update: Update) -> Receipt:
        if state.version == 0:
            return self._warm_up(state, update)
        if self.per == "tick":
            return self._due(state, update)
        gone = self._expire(state)
        client = update.task.client
        staleness = state.version - update.task.version
        stamp = int(state.stamps[client])
        active, first = state.version - stamp <= self.max_delay, stamp == 1
        scale = self.lr / state.count if state.count else 0.0
        wide = Wide(state.total, state.params)
        for part, old, write in state.table.exchange(update.task, state.seed, update.model, update.base):
            total = state.total[part]
            if gone is not None:
                row = old if gone == client else state.table.stored(gone, part, old.dtype)
                total.sub_(wide(row))
            if active and first:
                state.first[part].sub_(wide(old))
            if active:
                total.sub_(wide(old)).add_(wide(write()))
            wide.add(state.params[part], total, scale)
            if not active:
                total.add_(wide(write()))
        if not active:
            state.lapsed.append(client)
        state.count += not active
        state.cohort -= active and first
        state.version += 1
        state.stamps[client] = state.version
        state.recent.append(client)
        return Receipt.of(update, staleness, scale, True, state.version)

    def _warm_up(self, state: ACEDState, update: Update) -> Receipt:
        wide = Wide(state.total, state.params)
        for part, old, write in state.table.exchange(update.task, state.seed, update.model, update.base):
            state.total[part].sub_(wide(old)).add_(wide(write()))
        state.count += int(state.stamps[update.task.client]) == 0
        state.stamps[update.task.client] = 1
        full = state.count == len(state.table)
        if stepped := full and self.per == "arrival":
            self._begin(state)
        weight = self.lr / len(state.table)
        return Receipt.of(update, 0, weight, stepped, state.version, hold=not full)

    def _begin(self, state: ACEDState) -> None:
        """Everyone was heard: the first step."""
        advance(state.params, state.total, self.lr / state.count)
        state.first.copy_(state.total)
        state.cohort = state.count
        state.version = 1

    def _expire_cohort(self, state: ACEDState) -> None:
        """Those never heard again since the warm-up pass the bound together: one vector is taken out, not N rows."""
        if state.gathering is not None:  # N integers once in a run; N rows never
            state.lapsed.extend((state.stamps == 1).nonzero().flatten().tolist())
        state.total.sub_(state.first)
        state.count -= state.cohort
        state.cohort = 0

    def _expire(self, state: ACEDState) -> int | None:
        """Let those expire who passed the bound at this version; gives the client whose row is yet to be taken out.

        There is one at the most: one arrived per version.
        """
        if math.isinf(self.max_delay):
            state.recent.clear()
            return None
        last = state.version - math.floor(self.max_delay) - 1  # the newest stamp that is too old
        if last == 1 and state.cohort:
            self._expire_cohort(state)
        if not state.recent or state.oldest > last:
            return None
        client, stamp = state.recent.popleft(), state.oldest
        state.oldest += 1
        if int(state.stamps[client]) != stamp:
            return None  # heard again since
        state.count -= 1
        state.lapsed.append(client)
        return client

    # -- one step per tick ------------------------------------------------------------------------------------

    def _due(self, state: ACEDState, update: Update) -> Receipt:
        """An arrival of a tick: the row of who is out enters the sum after the step."""
        self._expire_all(state)
        client = update.task.client
        stamp = int(state.stamps[client])
        active = state.version - stamp <= self.max_delay
        first = active and stamp == 1 and client not in state.arrived
        wide = Wide(state.total, state.params)
        for part, old, write in state.table.exchange(update.task, state.seed, update.model, update.base):
            if first:
                state.first[part].sub_(wide(old))
            if active:
                state.total[part].sub_(wide(old)).add_(wide(write()))
            else:
                write()
        state.cohort -= first
        state.arrived[client] = None
        staleness = state.version - update.task.version
        return Receipt.of(update, staleness, self.lr / len(state.table), False, state.version)

    def close_round(self, state: ACEDState) -> None:
        """The end of a tick: a step even if nobody arrived, as long as everyone was heard."""
        if state.version == 0:
            if state.count == len(state.table):
                self._begin(state)
            return
        self._expire_all(state)
        if state.count:
            advance(state.params, state.total, self.lr / state.count)
        for client in state.arrived:
            if state.version - int(state.stamps[client]) > self.max_delay:
                self._fold(state, client, 1)
        state.version += 1
        for client in state.arrived:
            state.stamps[client] = state.version
            state.stamped.append((state.version, client))
        state.arrived.clear()

    def _expire_all(self, state: ACEDState) -> None:
        """Take out the rows of those who passed the bound at this version."""
        if state.cohort and state.version - 1 > self.max_delay:
            self._expire_cohort(state)
        while state.stamped and state.version - state.stamped[0][0] > self.max_delay:
            stamp, client = state.stamped.popleft()
            if int(state.stamps[client]) == stamp:  # else heard again since
                self._fold(state, client, -1)
                state.lapsed.append(client)

    def _fold(self, state: ACEDState, client: int, sign: int) -> None:
        """Add a row to the sum, or take it out."""
        wide = Wide(state.total, state.params)
        for part in chunks(state.total):
            row = state.table.stored(client, part, state.params.dtype)
            state.total[part].add_(wide(row), alpha=sign)
        state.count += sign
