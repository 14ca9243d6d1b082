"""Every strategy, through its server, against the oracle of its paper over long random arrivals, in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oracles
from afield import strategies
from afield.core.keys import generator
from afield.core.server import Server
from afield.core.types import Task, Update
from afield.strategies import staleness
from afield.training.distill import Distil
from oracles import Drive, Paper, start

CLIENTS = 6
SIZE = 5
ARRIVALS = 400

Row = tuple[Any, Callable[[np.ndarray, int], Paper]]


def form(name: str, *numbers: float) -> Callable[[int], float]:
    return lambda s: oracles.STALENESS[name](s, *numbers)


IMMEDIATE: dict[str, Row] = {
    "fedasync constant": (
        strategies.FedAsync(alpha=0.7),
        partial(oracles.FedAsync, alpha=0.7),
    ),
    "fedasync linear": (
        strategies.FedAsync(weight=staleness.Linear(0.3)),
        partial(oracles.FedAsync, s=form("linear", 0.3)),
    ),
    "fedasync polynomial": (
        strategies.FedAsync(weight=staleness.Polynomial(0.5)),
        partial(oracles.FedAsync, s=form("polynomial", 0.5)),
    ),
    "fedasync exponential": (
        strategies.FedAsync(weight=staleness.Exponential(0.1)),
        partial(oracles.FedAsync, s=form("exponential", 0.1)),
    ),
    "fedasync hinge": (
        strategies.FedAsync(weight=staleness.Hinge(a=10, b=4)),
        partial(oracles.FedAsync, s=form("hinge", 10, 4)),
    ),
    "fedasync drops": (
        strategies.FedAsync(alpha=0.9, drops={100: 0.5, 250: 0.4}),
        partial(oracles.FedAsync, alpha=0.9, drops={100: 0.5, 250: 0.4}),
    ),
    "fedasync sqrt": (
        strategies.FedAsync(alpha=0.9, decay="sqrt", weight=staleness.Polynomial(0.2), drops={50: 0.5}),
        partial(oracles.FedAsync, alpha=0.9, root=True, s=form("polynomial", 0.2), drops={50: 0.5}),
    ),
    "twafl power": (
        strategies.TWAFL(decay=0.8),
        partial(oracles.TWAFL, f=lambda age: 0.8**age),
    ),
    "twafl default": (
        strategies.TWAFL(),
        partial(oracles.TWAFL, f=lambda age: 0.5**age),
    ),
    "twafl exp": (
        strategies.TWAFL(decay=0.1, form="exp"),
        partial(oracles.TWAFL, f=lambda age: math.exp(-0.1 * age)),
    ),
    "twafl arrival": (
        strategies.TWAFL(decay=0.9, stamp="arrival"),
        partial(oracles.TWAFL, f=lambda age: 0.9**age, stamp="arrival"),
    ),
    "twafl by examples": (
        strategies.TWAFL(decay=0.9, by_examples=True),
        partial(oracles.TWAFL, f=lambda age: 0.9**age, by_examples=True),
    ),
    "twafl exp arrival by examples": (
        strategies.TWAFL(decay=0.2, form="exp", stamp="arrival", by_examples=True),
        partial(oracles.TWAFL, f=lambda age: math.exp(-0.2 * age), stamp="arrival", by_examples=True),
    ),
    "rolling-fedavg": (strategies.RollingFedAvg(), oracles.TWAFL),
    "asgd": (strategies.ASGD(lr=0.5), partial(oracles.ASGD, lr=0.5)),
    "delay-adaptive scale": (
        strategies.DelayAdaptiveASGD(lr=0.8, threshold=4),
        partial(oracles.DelayAdaptive, lr=0.8, threshold=4, rule="scale"),
    ),
    "delay-adaptive inverse": (
        strategies.DelayAdaptiveASGD(lr=0.8, threshold=4, rule="inverse"),
        partial(oracles.DelayAdaptive, lr=0.8, threshold=4, rule="inverse"),
    ),
    "delay-adaptive drop": (
        strategies.DelayAdaptiveASGD(lr=0.8, threshold=4.5, rule="drop"),
        partial(oracles.DelayAdaptive, lr=0.8, threshold=4.5, rule="drop"),
    ),
    "ace": (strategies.ACE(lr=0.3), partial(oracles.ACE, lr=0.3)),
    "ace zeros": (strategies.ACE(lr=0.3, warmup="zeros"), partial(oracles.ACE, lr=0.3, wait=False)),
    "ace client": (strategies.ACE(lr=0.3, held="client"), partial(oracles.ACE, lr=0.3)),
    "ace client zeros": (
        strategies.ACE(lr=0.3, held="client", warmup="zeros"),
        partial(oracles.ACE, lr=0.3, wait=False),
    ),
    "sgd": (strategies.SGD(), oracles.SGD),
}

BUFFERED: dict[str, Row] = {
    "fedbuff": (strategies.FedBuff(size=4, lr=0.7), partial(oracles.FedBuff, size=4, lr=0.7)),
    "fedbuff polynomial": (
        strategies.FedBuff(size=3, weight=staleness.Polynomial(0.5)),
        partial(oracles.FedBuff, size=3, s=form("polynomial", 0.5)),
    ),
    "fedbuff hinge": (
        strategies.FedBuff(size=5, weight=staleness.Hinge(a=2, b=1)),
        partial(oracles.FedBuff, size=5, s=form("hinge", 2, 1)),
    ),
    "ca2fl": (strategies.CA2FL(size=4, lr=0.6), partial(oracles.CA2FL, size=4, lr=0.6)),
    "ca2fl larger than all": (strategies.CA2FL(size=9, lr=0.6), partial(oracles.CA2FL, size=9, lr=0.6)),
    "fadas": (strategies.FADAS(size=4, lr=0.05), partial(oracles.FADAS, size=4, lr=0.05)),
    "fadas paper": (
        strategies.FADAS(size=4, lr=0.05, bias_correction=False),
        partial(oracles.FADAS, size=4, lr=0.05, bias_correction=False),
    ),
    "fadas threshold": (
        strategies.FADAS(size=3, lr=0.05, delay_threshold=2),
        partial(oracles.FADAS, size=3, lr=0.05, threshold=2),
    ),
    "fadas paper threshold": (
        strategies.FADAS(size=3, lr=0.05, beta1=0.5, beta2=0.8, delay_threshold=5, bias_correction=False),
        partial(oracles.FADAS, size=3, lr=0.05, beta1=0.5, beta2=0.8, threshold=5, bias_correction=False),
    ),
    "fedac": (strategies.FedAC(size=4, lr=0.05), partial(oracles.FedAC, size=4, lr=0.05)),
    "fedac floor": (
        strategies.FedAC(size=3, lr=0.02, floor=0.5, beta1=0.3, beta2=0.95),
        partial(oracles.FedAC, size=3, lr=0.02, floor=0.5, beta1=0.3, beta2=0.95),
    ),
}

CHANCES = (1.0, 0.6, 0.4, 0.3, 0.2, 0.1)
SELDOM = (0.5, 0.4, 0.3, 0.2, 0.1, 0.05)  # one round in eight is empty

SYNCHRONOUS: dict[str, Row] = {
    "fedavg": (strategies.FedAvg(lr=0.9), partial(oracles.FedAvg, lr=0.9)),
    "fedavg plain": (strategies.FedAvg(by_examples=False), partial(oracles.FedAvg, by_examples=False)),
    "u-fedavg known": (
        strategies.UFedAvg(lr=0.4, p=SELDOM),
        partial(oracles.FedStale, beta=0, lr=0.4, p=SELDOM),
    ),
    "u-fedavg one p": (
        strategies.UFedAvg(lr=0.4, p=0.3),
        partial(oracles.FedStale, beta=0, lr=0.4, p=(0.3,) * CLIENTS),
    ),
    "u-fedavg fedau": (strategies.UFedAvg(lr=0.4), partial(oracles.FedStale, beta=0, lr=0.4)),
    "fedvarp known": (
        strategies.FedVARP(lr=0.3, p=SELDOM),
        partial(oracles.FedStale, beta=1, lr=0.3, p=SELDOM),
    ),
    "fedvarp fedau 3": (
        strategies.FedVARP(lr=0.3, cutoff=3),
        partial(oracles.FedStale, beta=1, lr=0.3, cutoff=3),
    ),
    "fedstale known": (
        strategies.FedStale(beta=0.3, lr=0.4, p=SELDOM),
        partial(oracles.FedStale, beta=0.3, lr=0.4, p=SELDOM),
    ),
    "mifa": (strategies.MIFA(lr=0.5), partial(oracles.MIFA, lr=0.5)),
    "scaffold": (strategies.Scaffold(lr=0.8), partial(oracles.Scaffold, lr=0.8)),
}
for cutoff in (1, 2, 3, None):
    wide = math.inf if cutoff is None else cutoff
    SYNCHRONOUS[f"fedstale fedau {cutoff}"] = (
        strategies.FedStale(beta=0.6, lr=0.4, cutoff=cutoff),
        partial(oracles.FedStale, beta=0.6, lr=0.4, cutoff=wide),
    )
    SYNCHRONOUS[f"u-fedavg fedau {cutoff}"] = (
        strategies.UFedAvg(lr=0.4, cutoff=cutoff),
        partial(oracles.FedStale, beta=0, lr=0.4, cutoff=wide),
    )


@pytest.mark.parametrize("name", IMMEDIATE)
def test_at_every_arrival(name: str) -> None:
    strategy, paper = IMMEDIATE[name]
    seen = Drive(strategy, paper(start(SIZE), CLIENTS)).arrivals(ARRIVALS)
    assert set(range(8)) <= seen.staleness and max(seen.staleness) > 50


@pytest.mark.parametrize("name", BUFFERED)
def test_per_buffer(name: str) -> None:
    strategy, paper = BUFFERED[name]
    oracle = paper(start(SIZE), CLIENTS)
    seen = Drive(strategy, oracle).arrivals(ARRIVALS)
    assert seen.repeated(strategy.size) > 20
    assert set(range(4)) <= seen.staleness and max(seen.staleness) > 8
    if getattr(strategy, "delay_threshold", None) is not None:
        assert 0 < oracle.slowed < oracle.t  # both sides of the threshold were met


@pytest.mark.parametrize("chances", [CHANCES, SELDOM], ids=["often", "seldom"])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_per_round(name: str, chances: tuple[float, ...]) -> None:
    strategy, paper = SYNCHRONOUS[name]
    seen = Drive(strategy, paper(start(SIZE), CLIENTS), tolerance=1e-9).rounds(150, chances)
    assert seen.staleness == {0}
    assert seen.empty == 0 if chances is CHANCES else seen.empty > 10


@pytest.mark.parametrize(
    ("strategy", "paper"),
    [
        (strategies.ASGD(lr=0.5, per="tick"), partial(oracles.TickASGD, lr=0.5)),
        (strategies.ACE(lr=0.3, per="tick"), partial(oracles.ACE, lr=0.3, tick=True)),
        (
            strategies.ACE(lr=0.3, per="tick", warmup="zeros"),
            partial(oracles.ACE, lr=0.3, tick=True, wait=False),
        ),
        (strategies.ACE(lr=0.3, per="tick", held="client"), partial(oracles.ACE, lr=0.3, tick=True)),
    ],
)
def test_per_tick(strategy: Any, paper: Callable[[np.ndarray, int], Paper]) -> None:
    seen = Drive(strategy, paper(start(SIZE), CLIENTS)).ticks(250)
    assert seen.empty > 30 and max(seen.staleness) > 20


@pytest.mark.parametrize("gamma", [0.8, 0.3, 0.99])
def test_mr_asyncfl_and_its_coefficients(gamma: float) -> None:
    strategy = strategies.MRAsyncFL(gamma=gamma)
    oracle = oracles.MRAsyncFL(start(SIZE), CLIENTS, gamma=gamma)
    drive = Drive(strategy, oracle)
    drive.arrivals(ARRIVALS)
    state: Any = drive.server.state
    now = [strategy.coefficient(state, i) for i in range(CLIENTS)]
    np.testing.assert_allclose(now, oracle.c, rtol=1e-12, atol=0)


@pytest.mark.parametrize("max_delay", [0, 1, 2.5, 4, 10, 40, 1000, math.inf])
def test_aced(max_delay: float) -> None:
    oracle = oracles.ACED(start(SIZE), CLIENTS, lr=0.3, max_delay=max_delay)
    Drive(strategies.ACED(lr=0.3, max_delay=max_delay), oracle).arrivals(ARRIVALS)
    assert oracle.t > 300  # the warm-up ended
    assert len(oracle.active()) < CLIENTS or max_delay > 30


def test_aced_with_nobody_active() -> None:
    """With a bound of 0 only the client of the last arrival is active; one bound lower nobody ever is.

    max_delay >= 0 always leaves the last arrival's client active, as its stamp is the version itself; so nobody
    can be active only where a stamp lags, which algorithm a.1 never does after its first arrival.
    """
    oracle = oracles.ACED(start(SIZE), CLIENTS, lr=0.3, max_delay=0)
    drive = Drive(strategies.ACED(lr=0.3, max_delay=0), oracle)
    drive.arrivals(ARRIVALS)
    assert oracle.alone == 0
