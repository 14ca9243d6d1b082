"""Asynchronous SGD, plain and delay-adaptive (Koloskova et al. 2022; Mishchenko et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from afield.core.errors import InputError, one_of, within
from afield.core.table import chunks
from afield.core.types import Receipt, ServerState, Update


@dataclass(slots=True, kw_only=True)
class TickState(ServerState):
    total: Tensor  # sum of the tick's deltas
    held: int = 0


def _add_delta(vector: Tensor, update: Update, weight: float) -> None:
    assert update.base is not None
    for part in chunks(vector):
        vector[part].add_(update.model[part], alpha=weight).sub_(update.base[part], alpha=weight)


def _tick_state(params: Tensor, per: str) -> TickState:
    return TickState(params=params, total=torch.zeros_like(params if per == "tick" else params[:0]))


def _end_tick(state: TickState, scale: float) -> None:
    if state.held:
        state.params.add_(state.total, alpha=scale / state.held)
        state.total.zero_()
        state.held = 0
    state.version += 1


@dataclass(frozen=True)
class ASGD:
    """Applies each delta as it arrives.

    Paper: asynchronous SGD as in Koloskova, Stich, Jaggi: Sharper Convergence Guarantees for Asynchronous SGD
        for Distributed and Federated Learning (NeurIPS 2022), algorithm 1.
    Rule: w <- w + lr delta; per tick: one step by the mean delta of the tick's arrivals.
    When: alike clients, or a small rate; the plainest asynchronous baseline. Unlike clients bias it towards
        those who come often.
    Differs: a client sends the delta of its whole task where the paper sends one gradient: `lr` 1 applies all
        of it. An empty tick moves nothing, the version rises.
    Parameters:
        lr: how much of a delta is applied
        per: "arrival", or "tick" for delays counted in server iterations (scheduler `ticks`)
    """

    lr: float = 1.0
    per: str = "arrival"
    uses_base: ClassVar[bool] = True
    linear: ClassVar[str] = "deltas"
    whole: ClassVar[bool] = False
    gathers: ClassVar[str] = "running"

    def __post_init__(self) -> None:
        within("lr", self.lr, 0, math.inf, above=True)
        one_of("per", self.per, ("arrival", "tick"))

    @property
    def pace(self) -> str:
        return self.per

    def init(self, params: Tensor, clients: int) -> TickState:
        return _tick_state(params, self.per)

    def receive(self, state: TickState, update: Update) -> Receipt:
        staleness = state.version - update.task.version
        if self.per == "tick":
            _add_delta(state.total, update, 1.0)
            state.held += 1
            return Receipt.of(update, staleness, self.lr, False, state.version)
        _add_delta(state.params, update, self.lr)
        state.version += 1
        return Receipt.of(update, staleness, self.lr, True, state.version)

    def close_round(self, state: TickState) -> None:
        _end_tick(state, self.lr)


@dataclass(frozen=True)
class DelayAdaptiveASGD:
    """Asynchronous SGD whose steps shrink once an update is staler than the threshold.

    Paper: Koloskova, Stich, Jaggi: Sharper Convergence Guarantees for Asynchronous SGD for Distributed and
        Federated Learning (NeurIPS 2022), eq. 11; Mishchenko, Bach, Even, Woodworth: Asynchronous SGD Beats
        Minibatch SGD Under Arbitrary Delays (NeurIPS 2022).
    Rule: w <- w + lr factor delta; factor 1 up to the threshold (their tau_C, the concurrency), above it as
        `rule` says.
    When: a few clients are far slower than the rest and alike in data: their old updates do less harm. With
        unlike data it mutes just those clients.
    Differs: `scale` is what the code of Mishchenko et al. and of ACE does; it may exceed the bound of ACE's
        algorithm a.4, line 9. `inverse` and `drop` are the two readings of the paper.
    Parameters:
        lr: how much of a delta is applied
        threshold: staleness up to which nothing shrinks; left out: how many clients train at a time
        rule: above the threshold "scale": threshold / staleness, "inverse": 1 / staleness, "drop": 0
        per: "arrival", or "tick": one step per tick by the mean of its arrivals' scaled deltas
    """

    lr: float = 1.0
    threshold: float | None = None
    rule: str = "scale"
    per: str = "arrival"
    uses_base: ClassVar[bool] = True
    linear: ClassVar[str] = "deltas"
    whole: ClassVar[bool] = False
    gathers: ClassVar[str] = "running"

    def __post_init__(self) -> None:
        within("lr", self.lr, 0, math.inf, above=True)
        one_of("rule", self.rule, ("scale", "inverse", "drop"))
        one_of("per", self.per, ("arrival", "tick"))
        if self.threshold is not None:
            within("threshold", self.threshold, 0, math.inf, above=True)

    @property
    def pace(self) -> str:
        return self.per

    def fitted(self, concurrency: int, participation: Sequence[float] | None) -> DelayAdaptiveASGD:
        return self if self.threshold is not None else replace(self, threshold=float(concurrency))

    def init(self, params: Tensor, clients: int) -> TickState:
        if self.threshold is None:
            raise InputError(
                "threshold is not set: give one (the number of clients that train at a time is usual)"
            )
        return _tick_state(params, self.per)

    def receive(self, state: TickState, update: Update) -> Receipt:
        staleness = state.version - update.task.version
        weight = self.lr * self.factor(staleness)
        if self.per == "tick":
            _add_delta(state.total, update, weight)
            state.held += 1
            return Receipt.of(update, staleness, weight, False, state.version)
        _add_delta(state.params, update, weight)
        state.version += 1
        return Receipt.of(update, staleness, weight, True, state.version)

    def close_round(self, state: TickState) -> None:
        _end_tick(state, 1.0)

    def factor(self, staleness: int) -> float:
        if self.threshold is None or staleness <= self.threshold:
            return 1.0
        return {"scale": self.threshold / staleness, "inverse": 1.0 / staleness, "drop": 0.0}[self.rule]
