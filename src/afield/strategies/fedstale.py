"""FedStale (Rodio, Neglia 2024), with its ends unbiased FedAvg and FedVARP, and FedAU's estimator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from afield.core.errors import InputError, one_of, within
from afield.core.table import PRECISIONS, ClientTable, Wide, chunks
from afield.core.types import Receipt, ServerState, Update

Known = float | tuple[float, ...] | str | None


@dataclass(slots=True)
class Intervals:
    """FedAU (Wang, Ji 2024): 1/p_i estimated by the mean interval between participations."""

    last: Tensor  # the round of a client's last participation, -1: none
    count: Tensor
    total: Tensor

    @classmethod
    def of(cls, clients: int) -> Intervals:
        count = torch.zeros(clients, dtype=torch.int64)
        return cls(torch.full_like(count, -1), count, torch.zeros_like(count))

    def inverse(self, client: int, now: int, cutoff: int | None) -> float:
        """1/p of a participant of round `now`; the interval that ends here counts from the next time on.

        Missed rounds are worked up here, in closed form: every `cutoff` of them are one interval.
        """
        count, total = int(self.count[client]), int(self.total[client])
        missed = now - int(self.last[client]) - 1
        if cutoff is not None:
            full = missed // cutoff
            count, total, missed = count + full, total + full * cutoff, missed - full * cutoff
        estimate = total / count if count else 1.0
        self.last[client] = now
        self.count[client] = count + 1
        self.total[client] = total + missed + 1
        return estimate


@dataclass(slots=True, kw_only=True)
class FedStaleState(ServerState):
    fresh: Tensor  # sum over the round's participants of (delta - beta cache) / p
    stale: Tensor  # sum of all caches at the start of the round (float64)
    change: Tensor  # what the round changes in that sum (float64)
    table: ClientTable | None  # None where beta is 0
    intervals: Intervals
    clients: int


def _check(lr: float, p: Known, cutoff: int | None) -> None:
    within("lr", lr, 0, math.inf, above=True)
    if cutoff is not None:
        within("cutoff", cutoff, 1, math.inf)
    if isinstance(p, str):
        one_of("p", p, ("known",))
    elif p is not None:
        for value in p if isinstance(p, tuple) else (p,):
            within("p", value, 0, 1, above=True)


def _known(p: Known, participation: Sequence[float] | None) -> Known:
    if p != "known":
        return p
    if participation is None:
        raise InputError(
            "p = 'known' needs a scheduler with known probabilities: use rounds of bernoulli or cohort"
        )
    return tuple(participation)


def _start(params: Tensor, clients: int, p: Known, beta: float, precision: str) -> FedStaleState:
    if isinstance(p, str):
        raise InputError("p = 'known' was not filled in: give a probability, or one per client")
    if isinstance(p, tuple) and len(p) != clients:
        raise InputError(f"p has {len(p)} probabilities for {clients} clients: give one per client")
    rest = params if beta else params[:0]
    return FedStaleState(
        params=params,
        fresh=torch.zeros_like(params),
        stale=torch.zeros_like(rest, dtype=torch.float64),
        change=torch.zeros_like(rest, dtype=torch.float64),
        table=ClientTable.like(params, clients, precision) if beta else None,
        intervals=Intervals.of(clients),
        clients=clients,
    )


def _receive(state: FedStaleState, update: Update, p: Known, cutoff: int | None, beta: float) -> Receipt:
    assert not isinstance(p, str)
    client = update.task.client
    if p is None:
        weight = state.intervals.inverse(client, state.version, cutoff)
    else:
        weight = 1.0 / (p[client] if isinstance(p, tuple) else p)
    if state.table is None:
        for part in chunks(state.fresh):
            _add_delta(state.fresh[part], update, part, weight)
    else:
        exact = state.table.precision == "float32"  # the new row is the delta: no need to work it out twice
        wide = Wide(state.change, state.params)
        for part, old, write in state.table.exchange(update.task, state.seed, update.model, update.base):
            fresh = state.fresh[part].sub_(old, alpha=beta * weight)
            change = state.change[part].sub_(wide(old))
            new = write()
            change.add_(wide(new))
            if exact:
                fresh.add_(new, alpha=weight)
            else:
                _add_delta(fresh, update, part, weight)
    return Receipt.of(update, state.version - update.task.version, weight, False, state.version)


def _add_delta(fresh: Tensor, update: Update, part: slice, weight: float) -> None:
    assert update.base is not None
    fresh.add_(update.model[part], alpha=weight).sub_(update.base[part], alpha=weight)


def _close(state: FedStaleState, lr: float, beta: float) -> None:
    wide = Wide(state.stale, state.params)
    for part in chunks(state.params):
        params = state.params[part].add_(state.fresh[part], alpha=lr / state.clients)
        if state.table is not None:
            wide.add(params, state.stale[part], lr * beta / state.clients)
            state.stale[part].add_(state.change[part])
            state.change[part].zero_()
        state.fresh[part].zero_()
    state.version += 1


@dataclass(frozen=True)
class FedStale:
    """Rounds: a convex combination of fresh updates and the stale ones of absent clients.

    Paper: Rodio, Neglia: FedStale: leveraging Stale Client Updates in Federated Learning (ECAI 2024), eq. 8.
    Rule: w <- w + lr/N (beta sum_i cache_i + sum_{i in S} (delta_i - beta cache_i) / p_i), caches before this
        round, p_i the probability that client i takes part.
    When: some clients take part rarely. With unlike data a large beta keeps them in the model; where they
        take part very rarely, a small one keeps very stale updates out. Needs a vector per client on the
        server.
    Differs: the weight decay and the skipped empty rounds of the authors' code are left out: an empty round
        still applies beta * mean cache, as eq. 8 says. Their code weighs clients by examples, the paper and
        we do not.
    Parameters:
        beta: weight of the stale updates: 0 is u-fedavg, 1 is fedvarp
        lr: the server's rate
        p: a probability, one per client, "known" (from the scheduler), or left out: FedAU's estimate
        cutoff: missed rounds that FedAU counts as one interval; left out: no bound
        precision: of the cached deltas: "float32", "bfloat16" or "int8"
    """

    beta: float = 0.5
    lr: float = 1.0
    p: Known = None
    cutoff: int | None = None
    precision: str = "float32"
    uses_base: ClassVar[bool] = True
    linear: ClassVar[str] = "deltas"
    whole: ClassVar[bool] = False
    gathers: ClassVar[str] = "newest"
    pace: ClassVar[str] = "round"

    def __post_init__(self) -> None:
        within("beta", self.beta, 0, 1)
        one_of("precision", self.precision, PRECISIONS)
        _check(self.lr, self.p, self.cutoff)

    def fitted(self, concurrency: int, participation: Sequence[float] | None) -> FedStale:
        return replace(self, p=_known(self.p, participation))

    def init(self, params: Tensor, clients: int) -> FedStaleState:
        return _start(params, clients, self.p, self.beta, self.precision)

    def receive(self, state: FedStaleState, update: Update) -> Receipt:
        return _receive(state, update, self.p, self.cutoff, self.beta)

    def close_round(self, state: FedStaleState) -> None:
        _close(state, self.lr, self.beta)


@dataclass(frozen=True)
class UFedAvg:
    """Rounds: unbiased FedAvg, each participant's delta divided by its probability (FedStale with beta 0).

    Paper: Rodio, Neglia: FedStale (ECAI 2024), eq. 5; with estimated probabilities Wang, Ji: A Lightweight
        Method for Tackling Unknown Participation Statistics in Federated Averaging (FedAU, ICLR 2024).
    Rule: w <- w + lr/N sum_{i in S} delta_i / p_i.
    When: clients take part unequally often and unlike data must not be biased by that. A rare client makes a
        large step when it comes: noisy where probabilities are small.
    Differs: FedAU's interval that ends in this round counts from the next participation on, as in its
        authors' code.
    Parameters:
        lr: the server's rate
        p: a probability, one per client, "known" (from the scheduler), or left out: FedAU's estimate
        cutoff: missed rounds that FedAU counts as one interval; left out: no bound
    """

    lr: float = 1.0
    p: Known = None
    cutoff: int | None = None
    uses_base: ClassVar[bool] = True
    linear: ClassVar[str] = "deltas"
    whole: ClassVar[bool] = False
    pace: ClassVar[str] = "round"

    def __post_init__(self) -> None:
        _check(self.lr, self.p, self.cutoff)

    def fitted(self, concurrency: int, participation: Sequence[float] | None) -> UFedAvg:
        return replace(self, p=_known(self.p, participation))

    def init(self, params: Tensor, clients: int) -> FedStaleState:
        return _start(params, clients, self.p, 0.0, "float32")

    def receive(self, state: FedStaleState, update: Update) -> Receipt:
        return _receive(state, update, self.p, self.cutoff, 0.0)

    def close_round(self, state: FedStaleState) -> None:
        _close(state, self.lr, 0.0)


@dataclass(frozen=True)
class FedVARP:
    """Rounds: the variance-reduced mean over all clients' newest deltas (FedStale with beta 1).

    Paper: Jhunjhunwala, Sharma, Nagarkatti, Joshi: FedVARP: Tackling the Variance Due to Partial Client
        Participation in Federated Learning (UAI 2022), in the unbiased form of FedStale's eq. 7.
    Rule: w <- w + lr (mean cache + 1/N sum_{i in S} (delta_i - cache_i) / p_i), caches before this round.
    When: few of many unlike clients take part in a round, each about equally often. Needs a vector per client
        on the server.
    Differs: the original divides by the number of participants; with p = k/N and k in every round that is the
        same.
    Parameters:
        lr: the server's rate
        p: a probability, one per client, "known" (from the scheduler), or left out: FedAU's estimate
        cutoff: missed rounds that FedAU counts as one interval; left out: no bound
        precision: of the cached deltas: "float32", "bfloat16" or "int8"
    """

    lr: float = 1.0
    p: Known = None
    cutoff: int | None = None
    precision: str = "float32"
    uses_base: ClassVar[bool] = True
    linear: ClassVar[str] = "deltas"
    whole: ClassVar[bool] = False
    gathers: ClassVar[str] = "newest"
    pace: ClassVar[str] = "round"

    def __post_init__(self) -> None:
        one_of("precision", self.precision, PRECISIONS)
        _check(self.lr, self.p, self.cutoff)

    def fitted(self, concurrency: int, participation: Sequence[float] | None) -> FedVARP:
        return replace(self, p=_known(self.p, participation))

    def init(self, params: Tensor, clients: int) -> FedStaleState:
        return _start(params, clients, self.p, 1.0, self.precision)

    def receive(self, state: FedStaleState, update: Update) -> Receipt:
        return _receive(state, update, self.p, self.cutoff, 1.0)

    def close_round(self, state: FedStaleState) -> None:
        _close(state, self.lr, 1.0)
