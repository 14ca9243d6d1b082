"""Worked numbers, rule by rule: every strategy and every oracle gives them; forms we do not offer, the oracle alone.

Clients 1, 2, 3 of the hand calculations are 0, 1, 2 here. Ten digits were written down, so 1e-9 is what they bear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from oracles import Arrival, Paper

from afield.core.server import Server
from afield.core.table import dequantise, quantise
from afield.core.types import Update
from afield.strategies import (
    CA2FL,
    FADAS,
    MIFA,
    TWAFL,
    DelayAdaptiveASGD,
    FedAC,
    FedAsync,
    FedBuff,
    FedStale,
    FedVARP,
    RollingFedAvg,
    UFedAvg,
)
from afield.strategies.staleness import Hinge, Polynomial

START = np.array([1.0, -1.0])
CLIENTS = 3
Pair = tuple[float, float]
Moves = list[tuple[int, int, Pair]]  # client, version of its base, delta

# Three buffers of two; client 0 is in the last one twice. Staleness 0, 0 | 1, 1 | 1, 0.
BUFFERS: Moves = [
    (0, 0, (0.2, -0.4)),
    (1, 0, (-0.6, 0.2)),
    (0, 0, (0.4, 0.0)),
    (2, 0, (0.0, 0.8)),
    (0, 1, (0.1, 0.1)),
    (0, 2, (-0.3, 0.5)),
]
# A step per arrival. Staleness 0, 1, 1, 3.
SINGLE: Moves = [(0, 0, (0.2, -0.4)), (1, 0, (-0.6, 0.2)), (0, 1, (0.4, 0.0)), (2, 0, (0.0, 0.8))]
P = (1.0, 0.5, 0.25)
ROUNDS: list[dict[int, Pair]] = [
    {0: (0.2, -0.4)},
    {0: (0.1, 0.1), 1: (-0.6, 0.2)},
    {},
    {0: (0.4, 0.0), 2: (0.0, 0.8)},
    {0: (-0.3, 0.5), 1: (0.5, 0.5)},
]


def through_server(strategy: Any, moves: Moves) -> tuple[list[list[float]], Server, list[Any]]:
    """The models of all versions. A task is leased as soon as the version that it starts from is there."""
    server = Server(strategy, torch.from_numpy(START.copy()), CLIENTS)
    tasks: dict[int, Any] = {}
    models, receipts = [], []
    for number, (_, _, delta) in enumerate(moves):
        for later, (client, base, _) in enumerate(moves):
            if later not in tasks and base == server.version:
                tasks[later] = server.checkout(client, 0.0)
        task = tasks[number]
        assert (task.client, task.version) == moves[number][:2]
        model = server.base(task) + torch.tensor(delta, dtype=torch.float64)
        receipts.append(server.submit(Update(task, model, None, 1)))
        if receipts[-1].stepped:
            models.append(server.model().tolist())
    return models, server, receipts


def through_oracle(paper: Paper, moves: Moves) -> list[list[float]]:
    for client, base, delta in moves:
        zero = np.zeros(2)
        paper.receive(Arrival(client, base, paper.versions[base] + np.array(delta), correction=zero))
    return [w.tolist() for w in paper.versions[1:]]


def rounds_through_server(strategy: Any) -> tuple[list[list[float]], Server]:
    server = Server(strategy, torch.from_numpy(START.copy()), CLIENTS)
    models = []
    for present in ROUNDS:
        for client, delta in present.items():
            task = server.checkout(client, 0.0)
            model = server.base(task) + torch.tensor(delta, dtype=torch.float64)
            server.submit(Update(task, model, None, 1))
        server.close_round()
        models.append(server.model().tolist())
    return models, server


def rounds_through_oracle(paper: Paper) -> list[list[float]]:
    for present in ROUNDS:
        for client, delta in present.items():
            paper.receive(Arrival(client, paper.t, paper.w + np.array(delta)))
        paper.close()
    return [w.tolist() for w in paper.versions[1:]]


def agree(models: Sequence[Sequence[float]], expected: Sequence[Pair]) -> None:
    np.testing.assert_allclose(models, expected, rtol=0, atol=1e-9)


def root(s: int) -> float:
    return (1 + s) ** -0.5


FIRST, CA2FL_SECOND = (0.8, -1.1), (0.7666666667, -0.5666666667)

# rule -> strategy (None where we do not offer that form), oracle, w_1, w_2, w_3
IN_BUFFERS: dict[str, tuple[Any, Callable[..., Paper], dict[str, Any], list[Pair]]] = {
    "fedbuff": (FedBuff(size=2), oracles.FedBuff, {}, [FIRST, (1, -0.7), (0.9, -0.4)]),
    "fedbuff, weights (1 + s)^-1/2, by the size": (
        FedBuff(size=2, weight=Polynomial(0.5)),
        oracles.FedBuff,
        {"s": root},
        [FIRST, (0.9414213562, -0.8171572875), (0.8267766953, -0.5318019485)],
    ),
    "fedbuff, the same by the sum of the weights": (
        None,
        oracles.FedBuff,
        {"s": root, "divide": "weights"},
        [FIRST, (1, -0.7), (0.8656854249, -0.3656854249)],
    ),
    "fedbuff in FLSim: weight 1 at staleness 1, a sum, lr 1/2": (
        None,
        oracles.FedBuff,
        {"s": lambda s: math.sqrt(2 / (1 + s)), "divide": "none", "lr": 0.5},
        [(0.7171572875, -1.141421356), (0.9171572875, -0.7414213562), (0.7550252532, -0.3378679656)],
    ),
    "ca2fl": (CA2FL(size=2), oracles.CA2FL, {}, [FIRST, CA2FL_SECOND, (0, 0.2666666667)]),
    "ca2fl by the number of updates": (
        None,
        oracles.CA2FL,
        {"distinct": False},
        [FIRST, CA2FL_SECOND, (0.35, 0.01666666667)],
    ),
    "ca2fl against the cache of the start": (
        None,
        oracles.CA2FL,
        {"frozen": True},
        [FIRST, CA2FL_SECOND, (-0.3, 0.3666666667)],
    ),
    "ca2fl against the cache of the start by the number of updates": (
        None,
        oracles.CA2FL,
        {"frozen": True, "distinct": False},
        [FIRST, CA2FL_SECOND, (0.2, 0.06666666667)],
    ),
    "fadas of the paper": (
        FADAS(size=2, lr=0.1, bias_correction=False),
        oracles.FADAS,
        {"lr": 0.1, "bias_correction": False},
        [(0.90000005, -1.0999999), (0.9070888595, -1.024791751), (0.8795720902, -0.9108456373)],
    ),
    "fadas of the code": (
        FADAS(size=2, lr=0.1),
        oracles.FADAS,
        {"lr": 0.1},
        [(0.900000005, -1.09999999), (0.9052631626, -1.044160952), (0.8877641394, -0.9716980315)],
    ),
    "fedac": (
        FedAC(size=2, lr=0.01),
        oracles.FedAC,
        {"lr": 0.01},
        [(0.9797614262, -1.020238571), (0.9911404453, -1.001653957), (0.9972130107, -0.9911885149)],
    ),
}


@pytest.mark.parametrize("rule", IN_BUFFERS)
def test_buffers(rule: str) -> None:
    strategy, paper, options, expected = IN_BUFFERS[rule]
    agree(through_oracle(paper(START, CLIENTS, size=2, **options), BUFFERS), expected)
    if strategy is not None:
        models, _, receipts = through_server(strategy, BUFFERS)
        agree(models, expected)
        assert [receipt.staleness for receipt in receipts] == [0, 0, 1, 1, 1, 0]


def test_ca2fl_in_detail() -> None:
    moved = np.diff([START, *through_server(CA2FL(size=2), BUFFERS)[0]], axis=0)
    v = [(-0.2, -0.1), (-0.0333333333, 0.5333333333), (-0.7666666667, 0.8333333333)]
    agree(moved, v)
    mean = [(-0.1333333333, -0.0666666667), (-0.0666666667, 0.3333333333), (-0.3, 0.5)]
    for buffers, expected in enumerate(mean, start=1):
        state: Any = through_server(CA2FL(size=2), BUFFERS[: 2 * buffers])[1].state
        agree([state.mean.tolist()], [expected])


def test_fedac_in_detail() -> None:
    """Fresh, then cosines below the floor: equal weights. Then r = (0.97, 0.1)."""
    receipts = through_server(FedAC(size=2, lr=0.01), BUFFERS)[2]
    r = [receipt.weight for receipt in receipts]
    np.testing.assert_allclose(r, [0.1, 0.1, 0.1, 0.1, 0.972281735, 0.1], rtol=0, atol=1e-9)
    shares = [r[k] / (r[2 * (k // 2)] + r[2 * (k // 2) + 1] + 1e-8) for k in range(6)]
    expected = [0.499999975] * 4 + [0.9067409191, 0.0932590716]
    np.testing.assert_allclose(shares, expected, rtol=0, atol=1e-9)


FEDASYNC: dict[str, tuple[Any, Callable[[int], float], list[float], list[Pair]]] = {
    "constant": (
        FedAsync(alpha=0.6),
        lambda s: 1.0,
        [0.6, 0.6, 0.6, 0.6],
        [(1.12, -1.24), (0.688, -0.976), (1.1872, -1.1344), (1.07488, -0.57376)],
    ),
    "polynomial": (
        FedAsync(alpha=0.6, weight=Polynomial(0.5)),
        root,
        [0.6, 0.4242640687, 0.4242640687, 0.3],
        [
            (1.12, -1.24),
            (0.8145298705, -1.05332381),
            (1.113835498, -1.13252381),
            (1.079684849, -0.8527666668),
        ],
    ),
    "hinge": (
        FedAsync(alpha=0.6, weight=Hinge(a=10, b=1)),
        lambda s: oracles.STALENESS["hinge"](s, 10, 1),
        [0.6, 0.6, 0.6, 0.02857142857],
        # the first three as with a constant weight: staleness 0, 1, 1 is within b
        [(1.12, -1.24), (0.688, -0.976), (1.1872, -1.1344), (1.181851429, -1.107702857)],
    ),
}


@pytest.mark.parametrize("name", FEDASYNC)
def test_fedasync(name: str) -> None:
    strategy, s, alphas, expected = FEDASYNC[name]
    agree(through_oracle(oracles.FedAsync(START, CLIENTS, alpha=0.6, s=s), SINGLE), expected)
    models, _, receipts = through_server(strategy, SINGLE)
    agree(models, expected)
    assert [receipt.staleness for receipt in receipts] == [0, 1, 1, 3]
    np.testing.assert_allclose([receipt.weight for receipt in receipts], alphas, rtol=0, atol=1e-9)


def test_another_hinge_is_not_ours() -> None:
    """Without the + 1 (a public port) the last weight would be 0.6 / 20."""
    assert pytest.approx(0.03) == 0.6 / (10 * (3 - 1))
    assert 0.6 * Hinge(a=10, b=1)(3) == pytest.approx(0.6 / 21)


@pytest.mark.parametrize(
    ("staleness", "drop", "inverse", "scale"),
    [(20, 1, 1, 1), (21, 0, 0.0476190476, 0.9523809524), (40, 0, 0.025, 0.5)],
)
def test_delay_adaptive_factors(staleness: int, drop: float, inverse: float, scale: float) -> None:
    for rule, expected in {"drop": drop, "inverse": inverse, "scale": scale}.items():
        factor = DelayAdaptiveASGD(threshold=20, rule=rule).factor(staleness)
        assert factor == pytest.approx(expected, abs=1e-9)


def test_fadas_rate_of_a_stale_buffer() -> None:
    """eta 0.001, threshold 1, stalest 5: the code's rate is 0.0002 (the paper's min(eta, 1/5) would be 0.001)."""

    def last_step(strategy: FADAS) -> np.ndarray:
        server = Server(strategy, torch.from_numpy(START.copy()), CLIENTS)
        slow = server.checkout(2, 0.0)
        for _ in range(5):
            task = server.checkout(0, 0.0)
            server.submit(Update(task, server.base(task) + 0.1, None, 1))
        before = server.model()
        server.submit(Update(slow, server.base(slow) - 0.3, None, 1))
        return (server.model() - before).numpy()

    slowed = last_step(FADAS(size=1, lr=0.001, delay_threshold=1))
    plain = last_step(FADAS(size=1, lr=0.001, delay_threshold=5))
    np.testing.assert_allclose(slowed * 0.001, plain * 0.0002, rtol=1e-9)


IN_ROUNDS: dict[str, tuple[Any, Callable[..., Paper], dict[str, Any], list[Pair]]] = {
    "u-fedavg": (
        UFedAvg(p=P),
        oracles.FedStale,
        {"beta": 0, "p": P},
        [
            (1.066666667, -1.133333333),
            (0.7, -0.9666666667),
            (0.7, -0.9666666667),
            (0.8333333333, 0.1),
            (1.066666667, 0.6),
        ],
    ),
    "fedstale": (
        FedStale(beta=0.5, p=P),
        oracles.FedStale,
        {"beta": 0.5, "p": P},
        [
            (1.066666667, -1.133333333),
            (0.7, -0.9666666667),
            (0.6166666667, -0.9166666667),
            (0.65, 0.1833333333),
            (0.9833333333, 0.7833333333),
        ],
    ),
    "fedvarp": (
        FedVARP(p=P),
        oracles.FedStale,
        {"beta": 1, "p": P},
        [
            (1.066666667, -1.133333333),
            (0.7, -0.9666666667),
            (0.5333333333, -0.8666666667),
            (0.4666666667, 0.2666666667),
            (0.9, 0.9666666667),
        ],
    ),
    "fedvarp for uniform sampling": (
        None,
        oracles.FedVARP,
        {},
        [
            (1.2, -1.4),
            (0.9166666667, -1.183333333),
            (0.9166666667, -1.183333333),
            (0.9, -0.7333333333),
            (1.033333333, 0),
        ],
    ),
    "mifa": (
        MIFA(),
        oracles.MIFA,
        {},
        [
            (1.066666667, -1.133333333),
            (0.9, -1.033333333),
            (0.7333333333, -0.9333333333),
            (0.6666666667, -0.6),
            (0.7333333333, 0),
        ],
    ),
    "fedau": (
        UFedAvg(),
        oracles.FedStale,
        {"beta": 0},
        [
            (1.066666667, -1.133333333),
            (0.9, -1.033333333),
            (0.9, -1.033333333),
            (1.033333333, -0.7666666667),
            (1.233333333, -0.2111111111),
        ],
    ),
    "fedau, cutoff 2": (
        UFedAvg(cutoff=2),
        oracles.FedStale,
        {"beta": 0, "cutoff": 2},
        [
            (1.066666667, -1.133333333),
            (0.9, -1.033333333),
            (0.9, -1.033333333),
            (1.033333333, -0.5),
            (1.233333333, 0.0555555556),
        ],
    ),
}


@pytest.mark.parametrize("rule", IN_ROUNDS)
def test_rounds(rule: str) -> None:
    strategy, paper, options, expected = IN_ROUNDS[rule]
    agree(rounds_through_oracle(paper(START, CLIENTS, **options)), expected)
    if strategy is not None:
        agree(rounds_through_server(strategy)[0], expected)


@pytest.mark.parametrize(
    ("cutoff", "intervals"),
    [(None, [[1, 1, 2, 1], [2, 3], [4]]), (2, [[1, 1, 2, 1], [2, 2, 1], [2, 2]])],
)
def test_fedau_intervals(cutoff: int | None, intervals: list[list[int]]) -> None:
    """Client 0 has probability 1 but is absent from the third round by construction."""
    paper = oracles.FedStale(START, CLIENTS, beta=0, cutoff=math.inf if cutoff is None else cutoff)
    rounds_through_oracle(paper)
    assert paper.intervals == intervals
    state: Any = rounds_through_server(UFedAvg(cutoff=cutoff))[1].state
    assert state.intervals.count.tolist() == [len(listed) for listed in intervals]
    assert state.intervals.total.tolist() == [sum(listed) for listed in intervals]


TEMPORAL: dict[str, tuple[Any, dict[str, Any], list[Pair]]] = {
    "twafl, a = e/2": (
        TWAFL(decay=2 / math.e),
        {"f": lambda age: (math.e / 2) ** -age},
        [(1.066666667, -1.133333333), (0.8666666667, -1.066666667), (1.010200751, -0.9944089242)],
    ),
    "twafl, not normalised": (
        None,
        {"f": lambda age: (math.e / 2) ** -age, "normalised": False},
        [(1.066666667, -1.133333333), (0.637657698, -0.7848094745), (0.6123302045, -0.6027580353)],
    ),
    "rolling-fedavg": (
        RollingFedAvg(),
        {},
        [(1.066666667, -1.133333333), (0.8666666667, -1.066666667), (0.9555555556, -0.9777777778)],
    ),
}


@pytest.mark.parametrize("rule", TEMPORAL)
def test_temporal(rule: str) -> None:
    strategy, options, expected = TEMPORAL[rule]
    agree(through_oracle(oracles.TWAFL(START, CLIENTS, **options), SINGLE[:3]), expected)
    if strategy is not None:
        agree(through_server(strategy, SINGLE[:3])[0], expected)


VALUES = (0, 0.1, -0.25, 0.5, 1, -1, 0.33, 0.0078740157)


def test_quantiser() -> None:
    """Entry 3 lies half way (63.5) and its draw is 0.5, which is not below one half: it goes down."""
    draws = torch.tensor((0.5, 0.9, 0.2, 0.5, 0.5, 0.5, 0.05, 0.5))
    codes, scale = quantise(torch.tensor(VALUES), draws)
    assert scale.tolist() == pytest.approx([0.007874015748], abs=1e-9)
    assert codes.tolist() == [0, 12, -31, 63, 127, -127, 42, 1]
    stored = [0, 0.094488189, -0.2440944882, 0.4960629921, 1, -1, 0.3307086614, 0.0078740157]
    assert dequantise(codes, scale).tolist() == pytest.approx(stored, abs=1e-7)  # float32


def test_quantiser_is_right_on_average() -> None:
    """2e5 draws: the mean error of an entry has standard deviation at most s / 2 / sqrt(2e5) = 8.8e-6."""
    count = 200_000
    draw = torch.Generator().manual_seed(3)
    mean = torch.zeros(8, dtype=torch.float64)
    for column in range(8):
        # 1023 copies of one value and a 1, which sets the scale, per block
        blocks = torch.full((-(-count // 1023), 1024), VALUES[column])
        blocks[:, 0] = 1.0
        codes, scale = quantise(blocks.flatten(), torch.rand(blocks.numel(), generator=draw))
        mean[column] = dequantise(codes, scale).view_as(blocks)[:, 1:].flatten()[:count].double().mean()
    errors = (mean - torch.tensor(VALUES, dtype=torch.float64)).abs()
    assert float(errors.max()) <= 4 * 8.8e-6
    assert float(errors[[0, 4, 5]].max()) == 0.0  # zero and the extremes are exact
