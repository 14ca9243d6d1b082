"""Normalisation statistics: what is gathered in each mode, and what a server makes of it at a step, by hand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from torch import Tensor

from afield.core.errors import InputError
from afield.core.server import Server
from afield.core.statistics import RUNNING, Gathering
from afield.core.types import Task, Update
from afield.strategies import (
    ACE,
    ACED,
    ASGD,
    CA2FL,
    MIFA,
    TWAFL,
    DelayAdaptiveASGD,
    FedAsync,
    FedAvg,
    FedBuff,
    FedStale,
    MRAsyncFL,
    Scaffold,
)


def task(client: int, count: int = 0) -> Task:
    return Task(number=0, client=client, count=count, version=0, started=0.0)


def pair(mean: float, variance: float) -> Tensor:
    return torch.tensor([mean, variance], dtype=torch.float32)


# -- Gathering ----------------------------------------------------------------------------------------------------


def test_buffer_is_the_mean_since_the_last_step() -> None:
    gathering = Gathering.of("buffer", pair(9, 9), 3)
    now = pair(9, 9)
    gathering.step(now)
    assert now.tolist() == [9, 9]  # nothing gathered: it stays
    gathering.add(task(0), pair(1, 2))
    gathering.add(task(0, 1), pair(3, 4))  # a client that comes twice counts twice
    gathering.add(task(2), pair(5, 9))
    gathering.step(now)
    assert now.tolist() == [(1 + 3 + 5) / 3, (2 + 4 + 9) / 3]
    gathering.add(task(1), pair(7, 8))
    gathering.step(now)
    assert now.tolist() == [7, 8]  # what came before the last step is gone


def test_newest_is_the_mean_over_clients() -> None:
    gathering = Gathering.of("newest", pair(9, 9), 3)
    now = pair(9, 9)
    gathering.step(now)
    assert now.tolist() == [9, 9]
    gathering.add(task(0), pair(1, 2))
    gathering.add(task(2), pair(5, 6))
    gathering.step(now)
    assert now.tolist() == [3, 4]  # client 1 was not heard: it does not count
    gathering.add(task(0, 1), pair(3, 8))
    gathering.step(now)
    assert now.tolist() == [4, 7]
    gathering.step(now)
    assert now.tolist() == [4, 7]  # nothing new: the same again


def test_running_is_a_tenth_per_arrival() -> None:
    assert RUNNING == 0.1
    gathering = Gathering.of("running", pair(1, 2), 3)
    now = pair(1, 2)
    gathering.step(now)
    assert now.tolist() == [1, 2]
    gathering.add(task(0), pair(11, 12))
    gathering.step(now)
    assert now.tolist() == pytest.approx([0.9 * 1 + 1.1, 0.9 * 2 + 1.2])
    gathering.add(task(0, 1), pair(0, 0))
    gathering.add(task(1), pair(0, 10))
    gathering.step(now)
    assert now.tolist() == pytest.approx([0.9 * 0.9 * 2.0, 0.9 * 0.9 * 3.0 + 0.1 * 10])


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(InputError, match="gathers"):
        Gathering.of("newer", pair(0, 0), 2)


@pytest.mark.parametrize("mode", ["buffer", "running"])
def test_nobody_lapses_where_no_client_is_remembered(mode: str) -> None:
    gathering = Gathering.of(mode, pair(0, 1), 2)
    gathering.add(task(0), pair(4, 4))
    before = gathering.total.clone()
    gathering.lapse([0, 1])
    assert torch.equal(gathering.total, before)


@pytest.mark.parametrize(
    "gone",
    [[1], [1, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4], [3, 3, 1, 3], []],
    ids=["one", "two", "most", "all", "one twice", "none"],
)
def test_lapsed_clients_stop_counting_until_heard_again(gone: list[int]) -> None:
    """Few are taken out of the sum; of many, the few that stay are added up anew: one result."""
    values = [pair(1, 2), pair(3, 5), pair(7, 11), pair(13, 17), pair(19, 23)]
    gathering = Gathering.of("newest", pair(0, 1), 6)
    for client, value in enumerate(values):
        gathering.add(task(client), value)
    gathering.lapse([*gone, 5])  # 5 was never heard: nothing to take
    stay = [value for client, value in enumerate(values) if client not in gone]
    assert gathering.count == len(stay)
    now = pair(0.5, 1.5)
    gathering.step(now)
    expected = torch.stack(stay).mean(0) if stay else pair(0.5, 1.5)
    torch.testing.assert_close(now, expected)
    gathering.lapse(gone)  # again: they are out already
    assert gathering.count == len(stay)
    gathering.add(task(1, 1), pair(100, 200))
    gathering.step(now)
    kept = [v for client, v in enumerate(values) if client not in gone and client != 1]
    torch.testing.assert_close(now, torch.stack([*kept, pair(100, 200)]).mean(0))


@pytest.mark.parametrize("mode", ["buffer", "newest", "running"])
def test_gathering_against_plain_lists(mode: str) -> None:
    """Random arrivals, lapses and steps against lists of everything, with variances that stay positive."""
    draw = random.Random(3)
    gathering = Gathering.of(mode, pair(0, 1), 8)
    ours, theirs = pair(0, 1), np.array([0.0, 1.0])
    newest: dict[int, np.ndarray] = {}
    buffer: list[np.ndarray] = []
    average = theirs
    for count in range(600):
        value = pair(draw.gauss(0, 1), draw.random())
        client = draw.randrange(8)
        if draw.random() < 0.2:
            gone = draw.sample(range(8), draw.choice([1, 2, 7]))
            gathering.lapse(gone)
            newest = {other: kept for other, kept in newest.items() if other not in gone}
        gathering.add(task(client, count), value)
        newest[client] = value.double().numpy()
        buffer.append(value.double().numpy())
        average = 0.9 * average + 0.1 * value.double().numpy()
        if draw.random() < 0.4:
            gathering.step(ours)
            means = {"buffer": buffer, "newest": list(newest.values()), "running": [average]}
            theirs = np.mean(means[mode], axis=0)
            buffer = []
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=1e-6)
        assert float(ours[1]) >= 0


# -- through a server, one strategy of each kind ------------------------------------------------------------------

P = 3  # parameters; one mean and one variance follow


class Door:
    """A server of three clients whose updates all carry the parameters 1, 1, 1 and the statistics given."""

    def __init__(self, strategy: Any) -> None:
        self.server = Server(strategy, torch.tensor([0.0, 0, 0, 10, 20]), 3, parameters=P)

    def send(self, client: int, mean: float, variance: float) -> list[float]:
        leased = self.server.checkout(client, 0.0)
        model = torch.tensor([1.0, 1, 1, mean, variance])
        assert self.server.submit(Update(leased, model, None, examples=1 + client)).refused == ""
        return self.now

    def close(self) -> list[float]:
        self.server.close_round()
        return self.now

    @property
    def now(self) -> list[float]:
        return self.server.model()[P:].tolist()


def test_a_buffer_moves_them_at_its_step_only() -> None:
    door = Door(FedBuff(size=2, lr=5.0))  # a rate that would drive variances negative
    assert door.send(0, 1, 3) == [10, 20]
    assert door.send(1, 3, 4) == [2, 3.5]
    assert door.send(1, 8, 6) == [2, 3.5]
    assert door.send(1, 6, 8) == [7, 7]


@pytest.mark.parametrize("strategy", [FedAvg(lr=5.0), Scaffold(lr=5.0)])
def test_a_round_moves_them_to_its_plain_mean(strategy: Any) -> None:
    door = Door(strategy)
    assert door.close() == [10, 20]  # nobody came
    door.send(0, 1, 3)
    assert door.send(2, 3, 4) == [10, 20]
    assert door.close() == [2, 3.5]  # not by examples
    assert door.close() == [2, 3.5]
    door.send(1, 5, 6)
    assert door.close() == [5, 6]


@pytest.mark.parametrize("strategy", [MIFA(lr=5.0), FedStale(lr=5.0)])
def test_a_round_with_a_table_takes_the_newest_of_all(strategy: Any) -> None:
    door = Door(strategy)
    assert door.close() == [10, 20]
    door.send(0, 1, 3)
    assert door.close() == [1, 3]
    door.send(2, 3, 5)
    assert door.close() == [2, 4]  # client 0 from the round before
    assert door.close() == [2, 4]
    door.send(0, 5, 7)
    door.send(1, 7, 9)
    assert door.close() == [5, 7]


def test_ca2fl_takes_the_newest_of_all_at_its_step() -> None:
    door = Door(CA2FL(size=2))
    assert door.send(0, 1, 3) == [10, 20]
    assert door.send(0, 5, 7) == [5, 7]
    assert door.send(1, 7, 9) == [5, 7]
    assert door.send(2, 9, 11) == [7, 9]


def test_ca2fl_takes_its_buffer_alone_where_told_so() -> None:
    door = Door(CA2FL(size=2, gathers="buffer"))
    assert door.send(0, 1, 3) == [10, 20]
    assert door.send(0, 5, 7) == [3, 5]
    assert door.send(1, 7, 9) == [3, 5]
    assert door.send(2, 9, 11) == [8, 10]
    with pytest.raises(InputError, match="gathers"):
        CA2FL(gathers="running")


def test_ace_waits_for_everyone() -> None:
    door = Door(ACE())
    assert door.send(0, 1, 3) == [10, 20]
    assert door.send(0, 4, 6) == [10, 20]
    assert door.send(1, 7, 9) == [10, 20]
    assert door.send(2, 10, 12) == [7, 9]  # (4 + 7 + 10) / 3
    assert door.send(2, 1, 3) == [4, 6]


def test_ace_from_zeros_counts_who_was_heard() -> None:
    door = Door(ACE(warmup="zeros"))
    assert door.send(0, 1, 3) == [1, 3]
    assert door.send(2, 5, 7) == [3, 5]


def test_ace_held_by_clients_sends_them_as_they_are() -> None:
    door = Door(ACE(warmup="zeros", held="client"))
    assert door.send(0, 1, 3) == [1, 3]
    assert door.send(0, 5, 7) == [5, 7]


def test_aced_leaves_out_who_is_late() -> None:
    """max_delay 1: A(t) holds the clients of the last two arrivals (and everyone at t = 1, 2 with stamp 1)."""
    door = Door(ACED(max_delay=1))
    door.send(0, 3, 3)
    door.send(1, 6, 6)
    assert door.send(2, 9, 9) == [6, 6]  # t = 0: everyone was heard
    assert door.send(0, 0, 0) == [5, 5]  # t = 1: all (0, 6, 9)
    assert door.send(1, 3, 3) == [4, 4]  # t = 2: stamps 2, 1, 1: all (0, 3, 9)
    assert door.send(0, 6, 6) == [4.5, 4.5]  # t = 3: stamps 2, 3, 1: clients 0 and 1 (6, 3)
    assert door.send(2, 60, 60) == [4.5, 4.5]  # t = 4: stamps 4, 3, 1: client 2 counts from the next step on
    assert door.send(0, 2, 2) == [31, 31]  # t = 5: stamps 4, 3, 5: clients 0 and 2 (2, 60)
    assert door.send(0, 4, 4) == [32, 32]  # t = 6: stamps 6, 3, 5
    assert door.send(1, 8, 8) == [4, 4]  # t = 7: stamps 7, 3, 5: client 0 alone (4)
    assert door.send(1, 10, 10) == [7, 7]  # t = 8: stamps 7, 8, 5: clients 0 and 1 (4, 10)


@pytest.mark.parametrize("max_delay", [0, 1, 3, 10, 40])
def test_aced_moves_statistics_by_the_clients_that_move_the_model(max_delay: int) -> None:
    """Random arrivals: A(t) of algorithm a.1, over lists, for the statistics too."""
    draw = random.Random(max_delay)
    clients = 6
    zeros = np.zeros(2)
    paper = oracles.ACED(zeros, clients, max_delay=max_delay)
    server = Server(ACED(max_delay=max_delay), torch.tensor([0.0, 0, 0, 1]), clients, parameters=2)
    newest: dict[int, np.ndarray] = {}
    due = np.array([0.0, 1.0])
    for _ in range(400):
        client = min(int(draw.expovariate(0.6)), clients - 1)
        leased = server.checkout(client, 0.0)
        value = torch.tensor([draw.gauss(0, 1), draw.random()])
        base = server.base(leased)
        server.submit(Update(leased, torch.cat([base[:2], value]), None, 1))
        newest[client] = value.double().numpy()
        counting = paper.active() if paper.t else list(newest)
        before = paper.t
        paper.receive(oracles.Arrival(client, paper.t, zeros))
        if paper.t > before:
            due = np.mean([newest[i] for i in counting], axis=0)
        assert server.version == paper.t
        np.testing.assert_allclose(server.model()[2:].numpy(), due, rtol=0, atol=1e-5)
    assert paper.t > 300


@pytest.mark.parametrize("strategy", [ASGD(lr=5.0), DelayAdaptiveASGD(lr=5.0, threshold=9)])
def test_asgd_keeps_a_running_mean(strategy: Any) -> None:
    door = Door(strategy)
    assert door.send(0, 0, 0) == pytest.approx([9, 18])
    assert door.send(1, 1, 8) == pytest.approx([8.2, 17])


def test_asgd_in_ticks_moves_them_at_the_tick() -> None:
    door = Door(ASGD(lr=5.0, per="tick"))
    assert door.close() == [10, 20]
    assert door.send(0, 0, 0) == [10, 20]
    assert door.send(1, 1, 8) == [10, 20]
    assert door.close() == pytest.approx([8.2, 17])
    assert door.close() == pytest.approx([8.2, 17])


def test_a_tick_that_fills_no_buffer_leaves_them() -> None:
    door = Door(FedBuff(size=3, per="tick"))
    assert door.send(0, 1, 2) == [10, 20]
    assert door.close() == [10, 20]
    assert door.send(1, 2, 3) == [10, 20]
    assert door.send(2, 6, 1) == [10, 20]
    assert door.close() == pytest.approx([3, 2])  # the mean of all three
    assert door.server.version == 2


def test_clients_that_lapse_at_a_tick_count_no_longer() -> None:
    door = Door(ACED(max_delay=1, per="tick"))
    for client, value in enumerate((1, 2, 6)):
        door.send(client, value, value)
    assert door.close() == pytest.approx([3, 3])  # version 1: everyone's stamp
    assert door.close() == pytest.approx([3, 3])
    door.send(0, 4, 4)
    assert door.close() == pytest.approx([4, 4])  # version 2: 4 = (4 + 2 + 6) / 3
    assert door.close() == pytest.approx([4, 4])  # version 3: of client 0 alone


def test_rules_that_mix_models_mix_statistics_with_them() -> None:
    """`whole`: no gathering at all, the same convex combination as for the parameters."""
    door = Door(FedAsync(alpha=0.5))
    assert door.server.state.gathering is None
    assert door.send(0, 4, 6) == [7, 13]
    door = Door(MRAsyncFL(gamma=0.5))
    # gamma (w + c (new - cache)) + (1 - gamma) new, c = 1/3, cache = w_0: (10 - 2) / 2 + 2 = 6, (20 - 14/3) / 2 + 3
    assert door.send(0, 4, 6) == pytest.approx([6, 23 / 3 + 3])
    door = Door(TWAFL(decay=1.0))
    assert door.send(0, 4, 5) == pytest.approx([8, 15])  # (4 + 10 + 10) / 3


@pytest.mark.parametrize("strategy", [MRAsyncFL(precision="int8"), TWAFL(precision="bfloat16")])
def test_a_table_below_float32_leaves_statistics_to_the_server(strategy: Any) -> None:
    door = Door(strategy)
    assert door.send(0, 1.001, 3.003) == pytest.approx([1.001, 3.003], rel=1e-6)  # not rounded to 8 bits
    assert door.send(2, 2.001, 4.003) == pytest.approx([1.501, 3.503], rel=1e-6)
