"""TWAFL (Chen, Sun, Jin 2019) as an event-driven rule, and Rolling FedAvg."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from afield.core.errors import one_of, within
from afield.core.table import PRECISIONS, ClientTable, Wide
from afield.core.types import Receipt, ServerState, Update

# A client with two tasks at once may answer the older one last: its stamp falls, and where it was nearly all of the
# sum, the rest is lost in rounding (of 2^-60 beside 1 nothing is left). Below this share every row is added up anew.
LOST = 1e-6
TINY = 1e-150  # below this unit the sum is rescaled: once in 500 arrivals at decay 0.5


@dataclass(slots=True, kw_only=True)
class TemporalState(ServerState):
    table: ClientTable
    total: Tensor  # sum_j n_j f(reference - stamp_j) cache_j / unit, float64: replaced rows leave no error behind
    unit: float  # fades for all rows at once
    mass: float  # sum_j n_j f(reference - stamp_j)
    peak: float  # the largest it was since the sums were exact: what rounding errors are relative to
    reference: int  # the newest stamp so far: every exponent is >= 0, nothing overflows
    stamps: Tensor
    sizes: Tensor  # n_j: 1, or the client's examples (0 before it is heard)


def _start(params: Tensor, clients: int, precision: str, by_examples: bool) -> TemporalState:
    # Every cache starts as w_0 with stamp 0. Examples are unknown before a client is heard: weight 0.
    heard = 0.0 if by_examples else 1.0
    return TemporalState(
        params=params,
        table=ClientTable.like(params, clients, precision, initial=params.clone()),
        total=params.double() * (clients * heard),
        unit=1.0,
        mass=clients * heard,
        peak=clients * heard,
        reference=0,
        stamps=torch.zeros(clients, dtype=torch.int64),
        sizes=torch.full((clients,), heard, dtype=torch.float64),
    )


def _replace(
    state: TemporalState, update: Update, fade: Callable[[int], float], stamp: int, size: float
) -> Receipt:
    """cache_i <- model; w <- the mean of all caches weighted by n_j f(age of their stamp)."""
    client = update.task.client
    staleness = state.version - update.task.version
    reference = max(state.reference, stamp)
    scale = fade(reference - state.reference)
    before = float(state.sizes[client]) * fade(reference - int(state.stamps[client]))
    after = size * fade(reference - stamp)
    state.mass = state.mass * scale + after - before
    state.peak = max(state.peak * scale, state.mass)
    lost = state.mass < LOST * state.peak
    unit = state.unit * scale
    if unit < TINY:
        state.total.mul_(unit)
        unit = 1.0
    wide = Wide(state.total, state.params)
    for part, old, write in state.table.exchange(update.task, state.seed, update.model):
        total = state.total[part].sub_(wide(old), alpha=before / unit)
        total.add_(wide(write()), alpha=after / unit)
        if not lost:
            # float64 division took 2.8 times as long, and gives the same float32 but for one in 10^8
            state.params[part].copy_(torch.mul(total, unit / state.mass, out=wide.blank(total)))
    state.unit = unit
    state.reference = reference
    state.stamps[client] = stamp
    state.sizes[client] = size
    if lost:
        _sum_anew(state, fade)
        after = size * fade(state.reference - stamp)
    state.version += 1
    return Receipt.of(update, staleness, after / state.mass, True, state.version)


def _sum_anew(state: TemporalState, fade: Callable[[int], float]) -> None:
    """Add up every row, against the newest stamp that is left."""
    counted = state.sizes.nonzero().flatten().tolist()
    state.reference = max(int(state.stamps[client]) for client in counted)
    state.total.zero_()
    state.unit = 1.0
    state.mass = 0.0
    for client in counted:
        weight = float(state.sizes[client]) * fade(state.reference - int(state.stamps[client]))
        state.total.add_(state.table.row(client, torch.float64), alpha=weight)
        state.mass += weight
    state.peak = state.mass
    state.params.copy_(state.total / state.mass)


@dataclass(frozen=True)
class TWAFL:
    """The mean of every client's newest model, faded by the age of its stamp.

    Paper: Chen, Sun, Jin: Communication-Efficient Federated Deep Learning with Layerwise Asynchronous Model
        Update and Temporally Weighted Aggregation (2019), used event by event as in MR.AsyncFL's comparison.
    Rule: cache_i <- model; w <- sum_j f(version - stamp_j) cache_j / sum_j f(version - stamp_j), with f(s) =
        decay^s ("power") or e^(-decay s) ("exp"). Unheard clients count as w_0 with stamp 0.
    When: every client's newest model shall count, old ones less. With decay far below 1 only the last few
        arrivals count, which suits alike clients only. Needs a model per client on the server.
    Differs: the layer-wise exchange of the paper is left out. Form, normalisation and stamp are open in the
        papers: we normalise, and `form` and `stamp` offer both readings.
    Parameters:
        decay: how fast a model fades with its age in versions
        form: "power": decay^age; "exp": e^(-decay age)
        stamp: a model's age counts from the version that its task started from ("dispatch") or from its
            "arrival"
        by_examples: weighs clients by their examples too; those not yet heard then do not count
        precision: of the stored models: "float32", "bfloat16" or "int8"
    """

    decay: float = 0.5
    form: str = "power"
    stamp: str = "dispatch"
    by_examples: bool = False
    precision: str = "float32"
    uses_base: ClassVar[bool] = False
    linear: ClassVar[str] = "models"
    gathers: ClassVar[str] = "newest"

    def __post_init__(self) -> None:
        one_of("form", self.form, ("power", "exp"))
        one_of("stamp", self.stamp, ("dispatch", "arrival"))
        one_of("precision", self.precision, PRECISIONS)
        if self.form == "power":
            within("decay", self.decay, 0, 1, above=True)
        else:
            within("decay", self.decay, 0, math.inf)

    @property
    def whole(self) -> bool:
        return self.precision == "float32"

    def init(self, params: Tensor, clients: int) -> TemporalState:
        return _start(params, clients, self.precision, self.by_examples)

    def receive(self, state: TemporalState, update: Update) -> Receipt:
        stamp = update.task.version if self.stamp == "dispatch" else state.version
        size = float(update.examples) if self.by_examples else 1.0
        return _replace(state, update, self.fade, stamp, size)

    def fade(self, age: int) -> float:
        return float(self.decay**age) if self.form == "power" else math.exp(-self.decay * age)


@dataclass(frozen=True)
class RollingFedAvg:
    """The plain mean of every client's newest model, w_0 for those not yet heard.

    Paper: the baseline of MR.AsyncFL's tables.
    Rule: cache_i <- model; w <- mean_j cache_j: TWAFL without fading.
    When: a baseline. It starts slowly, since everyone who was not heard counts as the initial model, and it
        cannot favour fresh models.
    Differs: nothing known; the paper describes it in a sentence.
    Parameters:
        precision: of the stored models: "float32", "bfloat16" or "int8"
    """

    precision: str = "float32"
    uses_base: ClassVar[bool] = False
    linear: ClassVar[str] = "models"
    gathers: ClassVar[str] = "newest"

    def __post_init__(self) -> None:
        one_of("precision", self.precision, PRECISIONS)

    @property
    def whole(self) -> bool:
        return self.precision == "float32"

    def init(self, params: Tensor, clients: int) -> TemporalState:
        return _start(params, clients, self.precision, by_examples=False)

    def receive(self, state: TemporalState, update: Update) -> Receipt:
        return _replace(state, update, lambda age: 1.0, update.task.version, 1.0)
