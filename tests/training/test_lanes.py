"""Tasks that are begun when they are dispatched: the same log and models as in the loop, and none for nobody."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from afield import STRATEGIES
from afield.core.flat import Layout
from afield.core.types import Receipt, Task
from afield.runtimes.simulate import assemble
from afield.runtimes.terms import Manners, Stop
from afield.scenarios.data import ClientData
from afield.scenarios.delays import Exponential
from afield.training.choose import trainer
from afield.training.lanes import DEPTH, STREAMS, Job, Lanes, LaneTrainer
from afield.training.local import Local, LoopTrainer
from afield.training.streams import StreamTrainer

SEED, LOCAL = 3, Local(epochs=2, batch=8, rate=0.05, momentum=0.9)


def data() -> ClientData:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(110, 1, 6, 6, generator=draw)
    targets = torch.randint(3, (110,), generator=draw)
    return ClientData(inputs, targets, list(torch.arange(110).split([30, 9, 21, 8, 42])))


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)
    )


def simulated(kind: Any, strategy: str, manners: Manners, device: str = "cpu") -> tuple[list[Any], Any]:
    module = cnn()
    sim = assemble(
        STRATEGIES[strategy](**({"size": 3} if strategy == "ca2fl" else {})),
        module,
        data(),
        stop=Stop(updates=40),
        delay=Exponential(),
        local=LOCAL,
        manners=manners,
        by=kind(module, data(), LOCAL, SEED, device=device),
        seed=SEED,
        device=device,
    )
    rows = [row for row in sim.rows() if isinstance(row, Receipt)]
    return rows, (sim.server.model().cpu(), sim.interrupted)


@pytest.mark.parametrize(
    "manners", [Manners(), Manners(max_staleness=3, stale="restart")], ids=["", "restart"]
)
@pytest.mark.parametrize("strategy", ["fedasync", "mr-asyncfl", "ca2fl"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_simulation_as_by_the_loop(strategy: str, manners: Manners, device: str) -> None:
    with torch.backends.cudnn.flags(allow_tf32=False):
        right, (model, stopped) = simulated(LoopTrainer, strategy, manners, device)
        found, (other, also) = simulated(LaneTrainer, strategy, manners, device)
    assert found == right
    assert stopped == also
    assert (stopped > 0) == (manners.max_staleness is not None)
    torch.testing.assert_close(other, model, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_more_tasks_than_lanes_taken_from_the_last(device: str) -> None:
    module, pool = cnn(), data()
    base = Layout.of(module).flatten(module).to(device)
    tasks = [Task(number, number % 5, number, 0, 0.0) for number in range(3 * STREAMS + 1)]
    bases, none = [base] * len(tasks), [None] * len(tasks)
    with torch.backends.cudnn.flags(allow_tf32=False):
        right = LoopTrainer(module, pool, LOCAL, SEED, device=device).train(tasks, bases, none)
        calls = LaneTrainer(module, pool, LOCAL, SEED, device=device).ahead(tasks, bases, none)
        for call, other in reversed(list(zip(calls, right, strict=True))):
            one = call()
            torch.testing.assert_close(one.model, other.model, rtol=1e-3, atol=1e-4)
            assert (one.examples, one.steps, one.finite) == (other.examples, other.steps, True)
            assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=1e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_that_is_not_finite_is_told(device: str) -> None:
    module = cnn()
    base = Layout.of(module).flatten(module).to(device)
    broken = base.clone()
    broken[5] = torch.nan
    tasks = [Task(number, number, 0, 0, 0.0) for number in range(2)]
    found = LaneTrainer(module, data(), LOCAL, SEED, device=device).train(tasks, [broken, base], [None] * 2)
    assert [one.finite for one in found] == [False, True]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_runs_with_other_rates_and_larger_clients_share_the_lanes(device: str) -> None:
    module, pool = cnn(), data()
    base = Layout.of(module).flatten(module).to(device)
    rates = [Local(batch=8, rate=rate) for rate in (0.05, 0.2)]
    engines = [LaneTrainer(module, pool, local, SEED, device=device) for local in rates]
    large = ClientData(pool.inputs, pool.targets, list(torch.arange(110).split([1, 99, 4, 3, 3])))
    tasks = [Task(number, number, 0, 0, 0.0) for number in range(5)]
    bases, none = [base] * 5, [None] * 5
    with torch.backends.cudnn.flags(allow_tf32=False):
        pairs = []
        for local, engine in zip(rates, engines, strict=True):
            for seed, mine in ((1, pool), (2, large)):
                loop = LoopTrainer(module, mine, local, seed, device=device)
                pairs.append((engine.sibling(mine, seed).ahead(tasks, bases, none), loop))
        for calls, loop in pairs:
            for call, other in zip(calls, loop.train(tasks, bases, none), strict=True):
                torch.testing.assert_close(call().model, other.model, rtol=1e-3, atol=1e-4)


def test_a_task_that_nobody_waits_for_any_more_is_not_begun() -> None:
    lanes, begun = Lanes(torch.device("cpu")), []

    def walk(name: str, lane: int) -> Iterator[None]:
        begun.append((name, lane))
        yield

    lanes.waiting.extend(
        [
            Job(partial(walk, "cancelled")),
            Job(partial(walk, "one"), lambda: 1),
            Job(partial(walk, "two"), int),
        ]
    )
    lanes.waiting[2].wanted = lambda: 1
    lanes.drain()
    assert [name for name, _ in begun] == ["one", "two"]
    assert len({lane for _, lane in begun}) == 2  # side by side


class Slow:
    """An event that is done when it is told to be."""

    done = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.done


def test_a_lane_queues_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afield.training.lanes.Past", Slow)
    monkeypatch.setattr(Slow, "done", False)
    lanes, made = Lanes(torch.device("cpu")), []

    def walk(lane: int) -> Iterator[None]:
        for _ in range(DEPTH + 5):
            made.append(lane)
            yield

    lanes.waiting.extend(Job(walk, lambda: 1) for _ in range(STREAMS + 3))
    lanes.pump()
    assert [made.count(lane) for lane in range(STREAMS)] == [DEPTH] * STREAMS
    assert made[:STREAMS] == list(range(STREAMS))  # in turns
    monkeypatch.setattr(Slow, "done", True)
    lanes.drain()
    assert len(made) == (STREAMS + 3) * (DEPTH + 5)


@pytest.mark.gpu
def test_large_models_are_trained_in_lanes() -> None:
    small, large = (
        cnn(),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(64, 75_000), nn.Linear(75_000, 3)),
    )
    assert type(trainer(small, data(), LOCAL, SEED, device="cuda")) is StreamTrainer
    assert type(trainer(large, data(), LOCAL, SEED, device="cuda")) is LaneTrainer
