"""Equalities between algorithms: where two rules must coincide, they do, on made-up arrivals and in training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from playback import PARAMETERS, play
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import afield
from afield.core.flat import Layout
from afield.strategies import (
    ACE,
    ACED,
    ASGD,
    CA2FL,
    SGD,
    TWAFL,
    DelayAdaptiveASGD,
    FedAsync,
    FedAvg,
    FedBuff,
    FedEcho,
    FedStale,
    FedVARP,
    RollingFedAvg,
    UFedAvg,
)
from afield.training.local import batches

CLIENTS = 5
BEATS = 120

# name -> two rules, and whether they do the same operations in the same order (then: the same bits)
PAIRS: dict[str, tuple[Any, Any, bool]] = {
    "fedbuff of size 1 = asgd": (FedBuff(size=1, lr=0.7), ASGD(lr=0.7), False),
    "delay-adaptive without a bound = asgd": (
        DelayAdaptiveASGD(lr=0.7, threshold=math.inf),
        ASGD(lr=0.7),
        True,
    ),
    "aced without a bound = ace": (ACED(lr=0.7, max_delay=math.inf), ACE(lr=0.7), True),
    "ace held by clients = held by the server": (ACE(lr=0.7, held="client"), ACE(lr=0.7), False),
    "ace held by clients = held by the server, from zeros": (
        ACE(lr=0.7, held="client", warmup="zeros"),
        ACE(lr=0.7, warmup="zeros"),
        False,
    ),
    "twafl that does not fade = rolling-fedavg": (TWAFL(decay=1.0), RollingFedAvg(), True),
    "twafl that does not fade, exp = rolling-fedavg": (
        TWAFL(decay=0.0, form="exp", stamp="arrival"),
        RollingFedAvg(),
        True,
    ),
    "fedecho at rate 0 = fedbuff": (
        FedEcho(size=3, lr=0.7, samples=8, batch=4, rate=0.0),
        FedBuff(size=3, lr=0.7),
        True,
    ),
    "fedstale, beta 0 = u-fedavg": (FedStale(beta=0, lr=0.7), UFedAvg(lr=0.7), True),
    "fedstale, beta 0 = u-fedavg, cutoff": (FedStale(beta=0, cutoff=2), UFedAvg(cutoff=2), True),
    "fedstale, beta 0 = u-fedavg, known": (FedStale(beta=0, p=0.6), UFedAvg(p=0.6), True),
    "fedstale, beta 1 = fedvarp": (FedStale(beta=1, lr=0.7), FedVARP(lr=0.7), True),
    "fedstale, beta 1 = fedvarp, cutoff": (FedStale(beta=1, cutoff=2), FedVARP(cutoff=2), True),
    "fedstale, beta 1 = fedvarp, known": (FedStale(beta=1, p=0.6), FedVARP(p=0.6), True),
    # rounds of 3 of 5 clients: what p is there
    "u-fedavg, p = 3/5 = fedavg": (UFedAvg(p=3 / 5), FedAvg(by_examples=False), False),
}


def models(strategy: Any, beats: int) -> Iterator[tuple[int, Tensor]]:
    """Version and parameters after each arrival. (Statistics are gathered as each rule says.)"""
    player = play(strategy, clients=CLIENTS, dtype=torch.float64)
    for _ in range(beats):
        player.beat()
        yield player.server.version, player.server.model()[:PARAMETERS]


@pytest.mark.parametrize("name", PAIRS)
def test_on_made_up_arrivals(name: str) -> None:
    one, other, bits = PAIRS[name]
    version = 0
    for (version, ours), (twin, theirs) in zip(models(one, BEATS), models(other, BEATS), strict=True):
        assert version == twin
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if bits else 1e-12)
    assert version >= BEATS // 3


def test_ca2fl_starts_as_fedbuff() -> None:
    """The first five arrivals are of five clients: one buffer, from caches of zero."""
    *_, (version, ours) = models(CA2FL(size=CLIENTS, lr=0.7), CLIENTS)
    *_, (_, theirs) = models(FedBuff(size=CLIENTS, lr=0.7), CLIENTS)
    assert version == 1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    *_, (_, later) = models(CA2FL(size=CLIENTS, lr=0.7), 2 * CLIENTS)
    *_, (_, other) = models(FedBuff(size=CLIENTS, lr=0.7), 2 * CLIENTS)
    assert not torch.allclose(later, other)  # and no further


# -- in training --------------------------------------------------------------------------------------------------

SIZES = (12, 7, 9, 5, 8)


def problem(sizes: tuple[int, ...] = SIZES) -> list[TensorDataset]:
    draw = torch.Generator().manual_seed(4)
    return [
        TensorDataset(
            torch.randn(size, 4, generator=draw, dtype=torch.float64),
            torch.randint(3, (size,), generator=draw),
        )
        for size in sizes
    ]


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def trained(strategy: Any, data: list[TensorDataset], **options: Any) -> tuple[Tensor, afield.Result]:
    settings = {"local": afield.Local(batch=4, rate=0.3), "delay": afield.delays.Exponential(), "seed": 3}
    result = afield.simulate(strategy, network(), data, **(settings | options))
    return Layout.of(result.model).flatten(result.model), result


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    start = network()
    assert (one - Layout.of(start).flatten(start)).norm() > 0.1  # something was learned


def descend(inputs: Tensor, targets: Tensor, orders: list[Tensor], rate: float) -> Tensor:
    """SGD in plain torch, one step per order."""
    module = network()
    for rows in orders:
        loss = functional.cross_entropy(module(inputs[rows]), targets[rows])
        slopes = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for weight, slope in zip(module.parameters(), slopes, strict=True):
                weight -= rate * slope
    return Layout.of(module).flatten(module)


@pytest.mark.parametrize("reply", ["after", "before"])
def test_fedasync_with_alpha_1_and_one_client_is_its_sequential_sgd(reply: str) -> None:
    data = problem((13,))
    local = afield.Local(epochs=2, batch=4, rate=0.3)
    ours, _ = trained(FedAsync(alpha=1.0), data, updates=6, local=local, reply=reply)
    # six tasks of two epochs, each going on where the last one ended
    orders = [rows for count in range(6) for rows in batches(local, 0, 13, (3, 0, count))]
    assert len(orders) == 6 * 2 * 4
    expected = descend(*data[0].tensors, orders, 0.3)
    if reply == "after":
        close(ours, expected)
        sequential, _ = trained(SGD(), data, updates=6, local=local)
        assert torch.equal(ours, sequential)
    else:  # a client that is answered before the fold goes on from the version before
        assert not torch.allclose(ours, expected)


def test_fedavg_with_one_client_and_full_batches_is_sgd() -> None:
    data = problem((13,))
    local = afield.Local(steps=3, batch=13, rate=0.3)
    rounds, log = trained(FedAvg(), data, versions=8, local=local, rounds=afield.schedulers.Cohort(1))
    pooled, _ = trained(SGD(), data, versions=8, local=local)
    assert len(log.receipts) == 8
    close(rounds, pooled)
    close(rounds, descend(*data[0].tensors, [torch.arange(13)] * 24, 0.3))


def test_fedavg_by_examples_with_one_full_step_each_is_sgd_on_the_pooled_data() -> None:
    """sum n_i grad_i / sum n_i is the gradient of the pooled mean."""
    data = problem()
    local = afield.Local(steps=1, batch=sum(SIZES), rate=0.3)
    rounds, _ = trained(FedAvg(), data, versions=8, local=local, rounds=afield.schedulers.Cohort(len(SIZES)))
    pooled, _ = trained(SGD(), data, versions=8, local=local)
    close(rounds, pooled)


@pytest.mark.parametrize("p", [2 / 5, "known"])
def test_u_fedavg_with_the_cohorts_share_is_plain_fedavg(p: float | str) -> None:
    cohort = afield.schedulers.Cohort(2)
    ours, log = trained(UFedAvg(p=p), problem(), versions=12, rounds=cohort)
    theirs, twin = trained(FedAvg(by_examples=False), problem(), versions=12, rounds=cohort)
    assert len(log.receipts) == 24
    assert [r.client for r in log.receipts] == [r.client for r in twin.receipts]
    close(ours, theirs)


def test_fedecho_at_rate_0_is_fedbuff() -> None:
    unlabelled = torch.randn(10, 4, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    echo = FedEcho(size=3, samples=10, batch=4, passes=2, rate=0.0)
    ours, log = trained(echo, problem(), updates=40, unlabelled=unlabelled)
    theirs, twin = trained(FedBuff(size=3), problem(), updates=40)
    assert log.receipts == twin.receipts
    close(ours, theirs)
    assert torch.equal(ours, theirs)
    taught = FedEcho(size=3, samples=10, batch=4, passes=2, rate=0.01)
    assert not torch.allclose(trained(taught, problem(), updates=40, unlabelled=unlabelled)[0], ours)


@pytest.mark.parametrize(
    "name",
    [
        "fedbuff of size 1 = asgd",
        "delay-adaptive without a bound = asgd",
        "aced without a bound = ace",
        "ace held by clients = held by the server",
        "twafl that does not fade = rolling-fedavg",
    ],
)
def test_in_training(name: str) -> None:
    one, other, bits = PAIRS[name]
    ours, log = trained(one, problem(), updates=50)
    theirs, twin = trained(other, problem(), updates=50)
    assert [(r.client, r.base, r.arrived) for r in log.receipts] == [
        (r.client, r.base, r.arrived) for r in twin.receipts
    ]
    close(ours, theirs)
    assert torch.equal(ours, theirs) or not bits
