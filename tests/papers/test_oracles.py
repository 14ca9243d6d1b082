"""Every strategy, through its server, against the oracle of its paper over long random arrivals, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from drive import Drive, start
from oracles import Paper
from torch import Tensor, nn

from afield import strategies
from afield.core.errors import InputError
from afield.core.keys import generator
from afield.core.server import Server
from afield.core.types import Update
from afield.strategies import staleness
from afield.training.distill import Distil

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
        (
            strategies.DelayAdaptiveASGD(lr=0.5, threshold=3, per="tick"),
            partial(oracles.TickDelayAdaptive, lr=0.5, threshold=3),
        ),
        (
            strategies.FedBuff(size=4, lr=0.5, per="tick"),
            partial(oracles.FedBuff, size=4, lr=0.5, tick=True, divide="count"),
        ),
        (strategies.CA2FL(size=4, lr=0.5, per="tick"), partial(oracles.CA2FL, size=4, lr=0.5, tick=True)),
        (strategies.ACED(lr=0.3, max_delay=0, per="tick"), partial(oracles.TickACED, lr=0.3, max_delay=0)),
        (strategies.ACED(lr=0.3, max_delay=4, per="tick"), partial(oracles.TickACED, lr=0.3, max_delay=4)),
        (
            strategies.ACED(lr=0.3, max_delay=math.inf, per="tick"),
            partial(oracles.ACE, lr=0.3, tick=True),
        ),
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


def test_aced_always_has_somebody_active() -> None:
    """Line 8 of a.1 is never reached: the client of the last arrival has the version itself as its stamp (line 9).

    So the tightest bound, 0, leaves that client alone, or all of them at t = 1.
    """
    oracle = oracles.ACED(start(SIZE), CLIENTS, lr=0.3, max_delay=0)
    drive = Drive(strategies.ACED(lr=0.3, max_delay=0), oracle)
    drive.arrivals(ARRIVALS)
    assert oracle.alone == 0
    last = drive.seen.receipts[-1].client
    assert oracle.active() == [last]
    with pytest.raises(InputError, match="max_delay"):
        strategies.ACED(max_delay=-1)


@pytest.mark.parametrize("decay", [0.5, 0.01])
@pytest.mark.parametrize("by_examples", [False, True])
def test_twafl_when_an_older_task_answers_last(decay: float, by_examples: bool) -> None:
    """A client that is nearly all of the sum falls back to an old stamp: the rest must still be there."""
    paper = oracles.TWAFL(start(SIZE), CLIENTS, f=lambda age: decay**age, by_examples=by_examples)
    drive = Drive(strategies.TWAFL(decay=decay, by_examples=by_examples), paper, tolerance=1e-9)
    slow = [drive._checkout(client) for client in range(CLIENTS) for _ in range(2)]
    drive._submit(slow.pop(0))
    for fall in range(3):
        for _ in range(100):  # client 0 alone: decay^100 is what the others weigh
            drive._submit(drive._checkout(0))
        assert paper.stamps[0] - max(paper.stamps[1:]) >= 99
        old = [task for task in slow if task.client == 0] if fall == 0 else slow[-1:]
        for task in old:
            slow.remove(task)
            drive._submit(task)


def test_twafl_when_one_after_the_other_falls_back() -> None:
    """Stamps 17 apart: each fall leaves 2^-17 of the sum, which is little lost; five in a row are all of it."""
    paper = oracles.TWAFL(start(SIZE), CLIENTS, f=lambda age: 0.5**age)
    drive = Drive(strategies.TWAFL(decay=0.5), paper, tolerance=1e-9)
    old = {client: drive._checkout(client) for client in range(CLIENTS)}
    idle = [drive._checkout(0) for _ in range(16 * CLIENTS)]  # of version 0: they raise the version alone
    for client in range(1, CLIENTS):
        for _ in range(16):
            drive._submit(idle.pop())
        drive._submit(drive._checkout(client))
    assert paper.stamps == [0, 16, 33, 50, 67, 84]
    for client in reversed(range(1, CLIENTS)):
        drive._submit(old[client])
    assert paper.stamps == [0] * CLIENTS


class Watched(Distil):
    """The real distiller, keeping a copy of what it was asked."""

    def __init__(self, module: nn.Module, unlabelled: Tensor) -> None:
        super().__init__(module, unlabelled)
        self.teachers: list[Tensor] = []
        self.keys: list[int] = []
        self.statistics: list[Tensor | None] = []

    def distil(self, params: Tensor, statistics: Any, teacher: Tensor, key: int, *rest: Any) -> None:
        self.teachers.append(teacher.clone())
        self.keys.append(key)
        self.statistics.append(None if statistics is None else statistics.clone())
        super().distil(params, statistics, teacher, key, *rest)


INPUTS, CLASSES = 3, 4


def batches(key: int, passes: int, samples: int, batch: int) -> list[list[int]]:
    """Every pass shuffles the samples by the key it was given."""
    orders = [torch.randperm(samples, generator=generator(key, turn)) for turn in range(passes)]
    return [rows.tolist() for order in orders for rows in torch.split(order, batch)]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("clip", [5.0, 0.02])
def test_fedecho(keep: bool, clip: float) -> None:
    module = nn.Linear(INPUTS, CLASSES).double()
    unlabelled = torch.randn(12, INPUTS, generator=generator(1), dtype=torch.float64)
    strategy = strategies.FedEcho(
        size=4, lr=0.7, samples=10, batch=4, passes=2, rate=0.02, clip=clip, alpha_max=0.9, keep=keep
    )
    distiller = Watched(module, unlabelled)
    paper = oracles.FedEcho(
        start(CLASSES * INPUTS + CLASSES),
        CLIENTS,
        size=4,
        lr=0.7,
        samples=10,
        rate=0.02,
        clip=clip,
        alpha_max=0.9,
        keep=keep,
        outputs=lambda w, rows: unlabelled[rows] @ w[:12].view(CLASSES, INPUTS).T + w[12:],
        batches=lambda k: batches(distiller.keys[k], 2, 10, 4),
    )
    drive = Drive(strategy, paper, tolerance=1e-9, distiller=distiller)
    seen = drive.arrivals(200)
    # once after every step, never between, each time from the newest logits of whoever was heard
    assert len(distiller.teachers) == len(paper.teachers) == 50 == sum(r.stepped for r in seen.receipts)
    for ours, theirs in zip(distiller.teachers, paper.teachers, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=1e-9)
    assert len(set(distiller.keys)) == 50  # other batches each time
    again = Watched(module, unlabelled)
    server = Server(strategy, torch.zeros(16, dtype=torch.float64), CLIENTS, distiller=again)
    for _ in range(12):
        task = server.checkout(0, 0.0)
        server.submit(Update(task, torch.ones(16, dtype=torch.float64), None, 1))
    assert again.keys == distiller.keys[:3]  # keyed by seed and version alone


def test_fedecho_with_normalisation() -> None:
    """A client's logits come from its own statistics; the student keeps the mean of the buffer's."""
    module = nn.Sequential(nn.Linear(INPUTS, CLASSES), nn.BatchNorm1d(CLASSES)).double()
    unlabelled = torch.randn(6, INPUTS, generator=generator(1), dtype=torch.float64)
    distiller = Watched(module, unlabelled)
    draw = torch.Generator().manual_seed(5)
    P, S = CLASSES * INPUTS + 3 * CLASSES, 2 * CLASSES
    initial = torch.cat([torch.randn(P, generator=draw, dtype=torch.float64), torch.ones(S).double()])
    strategy = strategies.FedEcho(size=3, samples=6, batch=6, rate=0.01)
    server = Server(strategy, initial, 3, parameters=P, distiller=distiller)
    newest: dict[int, Tensor] = {}
    buffer: list[Tensor] = []
    for client in (0, 1, 0, 2, 2, 1):
        task = server.checkout(client, 0.0)
        model = server.base(task) + torch.rand(P + S, generator=draw, dtype=torch.float64)
        weight, bias = model[:12].view(CLASSES, INPUTS), model[12:16]
        scale, shift, mean, variance = model[16:20], model[20:24], model[24:28], model[28:]
        plain = unlabelled @ weight.T + bias
        newest[client] = (plain - mean) / torch.sqrt(variance + 1e-5) * scale + shift
        buffer.append(model[P:].clone())
        receipt = server.submit(Update(task, model, None, 1))
        if receipt.stepped:
            teacher = sum(newest.values()) / len(newest)
            torch.testing.assert_close(distiller.teachers[-1], teacher, rtol=0, atol=1e-12)
            torch.testing.assert_close(distiller.statistics[-1], sum(buffer) / 3, rtol=0, atol=1e-12)
            torch.testing.assert_close(server.state.statistics, sum(buffer) / 3, rtol=0, atol=1e-12)
            buffer = []
    assert len(distiller.teachers) == 2
