"""Run by test_ray.py, inside a network namespace: what comes of a cluster is what comes of one process."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from cluster import add_node, cluster, kill_node
from stopping import in_pieces, whole
from tiny import TINY
from torch import Tensor, nn

from afield.cli import main
from afield.core.errors import InputError
from afield.core.flat import Layout
from afield.core.types import Receipt, Task
from afield.experiments.codec import merge
from afield.experiments.config import config
from afield.experiments.run import prepare
from afield.reports import load
from afield.runtimes.ray import CREWS, Crew, RayTrainer, crew
from afield.runtimes.simulate import assemble, threads
from afield.runtimes.terms import Stop
from afield.scenarios.data import ClientData, ListedData
from afield.scenarios.delays import Exponential
from afield.scenarios.schedulers import Concurrency
from afield.strategies import FedAsync, FedBuff, Scaffold
from afield.training.alone import alone
from afield.training.choose import Training
from afield.training.local import Local, LoopTrainer

CLIENTS, EACH, SEED = 12, 20, 5
LOCAL = Local(batch=10, rate=0.1, momentum=0.5)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with cluster(1, 1) as made:
        yield made


@pytest.fixture(scope="module")
def hands(nodes: Any) -> Crew:
    return crew("auto", None, 1, 0)


def pool() -> ClientData:
    stream = torch.Generator().manual_seed(2)
    inputs = torch.randn(CLIENTS * EACH, 1, 8, 8, generator=stream)
    targets = torch.randint(3, (len(inputs),), generator=stream)
    return ClientData(inputs, targets, list(torch.arange(len(inputs)).split(EACH)))


def cnn(channels: int = 8) -> nn.Module:
    torch.manual_seed(0)
    convolution = nn.Conv2d(1, channels, 3), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*convolution, nn.Flatten(), nn.Linear(9 * channels, 3))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 3))


def simulation(strategy: Any, module: nn.Module, by: Any, updates: int = 120) -> Any:
    return assemble(
        *(strategy, module, pool()),
        stop=Stop(updates=updates),
        scheduler=Concurrency(8),
        delay=Exponential(),
        local=LOCAL,
        training=Training("loop" if by is None else "auto"),
        by=by,
        seed=SEED,
    )


def log_and_model(
    simulator: Any, at: dict[int, Callable[[], object]] | None = None
) -> tuple[list[Any], Tensor]:
    """What happened, and what came of it; `at`: what else is done after so many updates."""
    log = []
    for row in simulator.rows():
        if isinstance(row, Receipt):
            log.append(row)
            (at or {}).get(len(log), lambda: None)()
    return log, simulator.server.model()


def on_ray(module: nn.Module, **options: Any) -> RayTrainer:
    return RayTrainer(module, pool(), LOCAL, SEED, **options)


def all_there(hands: Crew) -> None:
    while any(seat.hello is not None for seat in hands.seats):
        hands.collect(None)


def at_rest(hands: Crew) -> None:
    """A run may leave tasks behind that were begun early."""
    while any(seat.flight or seat.hello is not None for seat in hands.seats):
        hands.collect(None)


# ---- the same ----


@pytest.mark.parametrize(
    "strategy", [FedAsync(), FedBuff(size=3), Scaffold()], ids=lambda s: type(s).__name__
)
@pytest.mark.parametrize("make", [cnn, mlp])
def test_the_log_and_the_model_are_those_of_one_process(
    strategy: Any, make: Callable[[], nn.Module], hands: Crew
) -> None:
    module = make()
    trainer = on_ray(module)
    assert (trainer.crew, hands.count) == (hands, 2)
    assert trainer.method == ("workers" if make is cnn else "vmap")
    log, model = log_and_model(simulation(strategy, module, trainer))
    expected_log, expected = log_and_model(simulation(strategy, module, None))
    assert log == expected_log
    assert torch.allclose(model, expected, rtol=0, atol=1e-5)
    if make is cnn:
        here_log, here = as_a_worker(strategy, module)
        assert here_log == log
        assert torch.equal(here, model)


def as_a_worker(strategy: Any, module: nn.Module, updates: int = 120) -> tuple[list[Any], Tensor]:
    """What local workers give, to the bit."""
    with threads(1):
        return log_and_model(simulation(strategy, module, alone(module, pool(), LOCAL, SEED), updates))


def block(module: nn.Module, clients: Sequence[int]) -> tuple[list[Task], list[Tensor], list[None]]:
    base = Layout.of(module).flatten(module)
    return (
        [Task(n, c, n, 0, 0.0) for n, c in enumerate(clients)],
        [base] * len(clients),
        [None] * len(clients),
    )


def test_models_in_the_store_are_put_once_and_anew_when_they_change(hands: Crew) -> None:
    module = cnn(3000)  # 444 kB: too large to travel with a call
    trainer, loop = on_ray(module), alone(module, pool(), LOCAL, SEED)
    tasks, bases, none = block(module, [0, 3, 5])
    base, puts = bases[0], []
    put, hands.ray.put = hands.ray.put, lambda value: puts.append(len(value)) or put(value)
    try:
        for _ in range(2):
            for _ in range(2):
                found, expected = trainer.train(tasks, bases, none), loop.train(tasks, bases, none)
                assert all(torch.equal(a.model, b.model) for a, b in zip(found, expected, strict=True))
                assert all(a.metrics == b.metrics for a, b in zip(found, expected, strict=True))
            base.add_(0.01)
    finally:
        hands.ray.put = put
    assert puts == [base.nbytes] * 2


class Rows(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, at: int) -> tuple[Tensor, int]:
        if at >= len(self):
            raise IndexError(at)
        return torch.full((1, 8, 8), at / 7), at % 3


def test_any_data_set_and_any_order_of_taking(hands: Crew) -> None:
    module, data = cnn(), ListedData([Rows() for _ in range(4)])
    trainer, loop = RayTrainer(module, data, LOCAL, SEED), LoopTrainer(module, data, LOCAL, SEED)
    given, more = block(module, [0, 1, 2, 3, 0]), block(module, [3, 1])
    first, second = trainer.ahead(*given), trainer.ahead(*more)
    found = [second[1](), *(one() for one in reversed(first)), second[0]()]
    expected, others = loop.train(*given), loop.train(*more)
    wanted = [others[1], *reversed(expected), others[0]]
    assert all(torch.equal(a.model, b.model) for a, b in zip(found, wanted, strict=True))


def test_without_lines_calls_give_the_same(hands: Crew) -> None:
    module = cnn()
    trainer = on_ray(module)
    log, model = log_and_model(simulation(FedAsync(), module, trainer))
    at_rest(hands)
    lines = [(seat, seat.line) for seat in hands.seats]
    assert all(line is not None for _, line in lines)
    for seat, _ in lines:
        assert seat.calls is seat.actor  # it has left the line
        seat.line = None
    again_log, again = log_and_model(simulation(FedAsync(), module, trainer))
    at_rest(hands)
    for seat, line in lines:
        seat.line = line
    assert again_log == log
    assert torch.equal(again, model)


def test_small_and_large_models_in_turns(hands: Crew) -> None:
    """What is small goes by line, what is large by calls: an actor does both, in their order."""
    modules = cnn(), cnn(3000)
    trainers = [on_ray(module) for module in modules]
    given = [block(module, [0, 1, 2, 3, 4]) for module in modules]
    found = [trainer.ahead(*one) for trainer, one in zip(trainers, given, strict=True)]
    found += [trainer.ahead(*one) for trainer, one in zip(trainers, given, strict=True)]
    for calls, module, one in zip(found, modules * 2, given * 2, strict=True):
        expected = alone(module, pool(), LOCAL, SEED).train(*one)
        assert all(torch.equal(a().model, b.model) for a, b in zip(calls, expected, strict=True))


# ---- what goes wrong ----


class Interrupted(int):
    """A number in the midst of which Ctrl-C comes, once, when it is sent."""

    times: ClassVar[list[int]] = []

    def __reduce__(self) -> Any:
        self.times.append(self)
        if len(self.times) == 1:
            raise KeyboardInterrupt
        return int, (int(self),)


def test_after_ctrl_c_answers_are_those_of_their_tasks(hands: Crew) -> None:
    module = cnn()
    trainer = on_ray(module)
    tasks, bases, none = block(module, [0, 1, 2, 3])
    all_there(hands)
    before = hands.lost
    with pytest.raises(KeyboardInterrupt):
        trainer.ahead([tasks[0], Task(Interrupted(1), 1, 1, 0, 0.0), *tasks[2:]], bases, none)
    assert hands.lost == before + 1
    expected = alone(module, pool(), LOCAL, SEED).train(tasks, bases, none)
    found = trainer.train(tasks, bases, none)
    assert all(torch.equal(a.model, b.model) for a, b in zip(found, expected, strict=True))


def test_a_failure_is_told_to_whoever_asks_for_that_task(hands: Crew) -> None:
    for module in (cnn(), mlp()):
        trainer = on_ray(module)
        good, bad, fine = trainer.ahead(*block(module, [0, 99, 1]))
        assert fine().examples == good().examples == EACH
        with pytest.raises((RuntimeError, IndexError)) as told:
            bad()
        assert "99" in str(told.value) or isinstance(told.value, IndexError)
    with pytest.raises(InputError, match="requires_grad: there is nothing to train"):
        on_ray(cnn().requires_grad_(False))


class Homeless:
    """Data of a class that no actor can find."""

    sizes: Sequence[int] = (EACH,)

    def __reduce__(self) -> Any:
        return _found, ("nowhere",)


def _found(name: str) -> Any:
    return __import__(name)


def test_a_class_that_the_nodes_do_not_have_is_named(hands: Crew) -> None:
    with pytest.raises(RuntimeError, match=r"its first call.*No module named 'nowhere'"):
        RayTrainer(cnn(), Homeless(), LOCAL, SEED)  # type: ignore[arg-type]


class Deadly:
    """Client 1's data ends the process that looks at it."""

    sizes: Sequence[int] = (EACH,) * CLIENTS

    def batch(self, client: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        if client == 1:
            os._exit(9)
        return pool().batch(client, positions)


def test_a_task_that_kills_every_actor_ends_the_run_and_no_other(hands: Crew) -> None:
    module = cnn()
    trainer = RayTrainer(module, Deadly(), LOCAL, SEED)
    before, calls = hands.lost, trainer.ahead(*block(module, [0, 1, 2]))
    with pytest.raises(RuntimeError, match=r"\(client 1, task 1\): 3 actors were lost over it"):
        calls[1]()
    assert hands.lost - before >= 3
    expected = LoopTrainer(module, pool(), LOCAL, SEED).train(*block(module, [0, 1, 2]))
    assert torch.equal(calls[0]().model, expected[0].model)


def test_a_lost_process_and_then_a_lost_node_change_nothing(
    nodes: Any, hands: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    module = cnn()
    trainer = on_ray(module)
    [second] = list(nodes.worker_nodes)
    all_there(hands)
    before = hands.lost

    def end_an_actor() -> None:
        os.kill(hands.seats[0].process, signal.SIGKILL)

    def end_a_node() -> None:
        all_there(hands)  # so one is on that node
        kill_node(second)

    with caplog.at_level(logging.WARNING, "afield"):
        log, model = log_and_model(
            simulation(FedAsync(), module, trainer, updates=400),
            {40: end_an_actor, 200: end_a_node},
        )
    expected_log, expected = as_a_worker(FedAsync(), module, updates=400)
    assert log == expected_log
    assert torch.equal(model, expected)
    assert hands.lost - before >= 2
    assert sum("an actor is lost" in record.getMessage() for record in caplog.records) == hands.lost - before
    # the cluster is given another node: the actor that found no place is there again
    nodes.remove_node(second)
    add_node(nodes)
    all_there(hands)
    again_log, again = log_and_model(simulation(FedAsync(), module, trainer, updates=400))
    assert again_log == log
    assert torch.equal(again, model)


def test_a_node_that_is_cut_off_changes_nothing(nodes: Any, hands: Crew) -> None:
    module = cnn()
    trainer = on_ray(module)
    [second] = list(nodes.worker_nodes)
    all_there(hands)
    before = hands.lost
    log, model = log_and_model(
        simulation(FedAsync(), module, trainer), {40: lambda: kill_node(second, signal.SIGSTOP)}
    )
    expected_log, expected = as_a_worker(FedAsync(), module)
    assert log == expected_log
    assert torch.equal(model, expected)
    assert hands.lost == before + 1
    kill_node(second)
    nodes.remove_node(second)
    add_node(nodes)
    all_there(hands)


# ---- from a config ----


def receipts(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = load.find([folder])[0].receipts.to_pylist()
    return found


def test_a_config_on_ray_and_its_folder(tmp_path: Path, hands: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepared = prepare(config(merge(TINY, {"runtime": {"name": "ray"}})))
    assert prepared.config.runtime.actors == 2
    assert prepared.config.training.method == "vmap"
    here = [row for row in prepare(config(TINY)).simulator.rows() if isinstance(row, Receipt)]
    assert [row for row in prepared.simulator.rows() if isinstance(row, Receipt)] == here
    pooled = merge(TINY, {"strategy": {"name": "sgd"}})
    both = [prepare(config(merge(pooled, {"runtime": {"name": name}}))) for name in ("ray", "simulator")]
    logs = [[row for row in one.simulator.rows() if isinstance(row, Receipt)] for one in both]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("method", ["loop", "vmap"])
def test_a_run_on_ray_that_is_stopped_ends_with_the_same_bits(
    method: str, tmp_path: Path, hands: Crew
) -> None:
    chosen = config(merge(TINY, {"runtime": {"name": "ray"}, "training": {"method": method}}))
    found, stops = in_pieces(chosen, tmp_path / "pieces", 6)
    assert stops >= 3
    assert found == whole(chosen, tmp_path / "whole")


def test_a_sweep_over_the_cluster(tmp_path: Path, hands: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    hands.close()  # its actors hold every CPU there is
    CREWS.clear()
    monkeypatch.chdir(tmp_path)
    own = f"{Path(__file__).parents[2] / 'examples' / 'own_strategy.py'}:Clipped"
    given = ("run", "default", "--set", "seeds=[0,1]", "--set", "stop.updates=200", "--set", "stop.time=1e9")
    for strategy in ("fedasync", own):
        found = {}
        for engine in ("here", "ray"):
            out = f"{engine}-{strategy.rpartition(':')[2]}"
            asked = ("--engine", engine, "--strategy", strategy, "--out", out)
            monkeypatch.setattr(sys, "argv", ["afield", *given, *asked])
            with pytest.raises(SystemExit) as ended:
                main()
            assert ended.value.code == 0
            found[engine] = sorted(path.parent for path in Path(out).rglob("config.toml"))
        assert [one.name for one in found["here"]] == [one.name for one in found["ray"]]
        for here, there in zip(*found.values(), strict=True):
            assert sorted(p.name for p in here.iterdir()) == sorted(p.name for p in there.iterdir())
            assert receipts(here) == receipts(there)
