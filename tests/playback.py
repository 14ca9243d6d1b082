"""Feeds a server made-up arrivals: every client trains, one arrives, it gets the newest version again."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from afield.core.held import HeldDeltas
from afield.core.keys import generator, uniform
from afield.core.places import tables
from afield.core.server import Server
from afield.core.table import ClientTable
from afield.core.types import LocalResult, Receipt, Task
from afield.strategies import (
    ACE,
    ACED,
    ASGD,
    CA2FL,
    FADAS,
    MIFA,
    SGD,
    TWAFL,
    DelayAdaptiveASGD,
    FedAC,
    FedAsync,
    FedAvg,
    FedBuff,
    FedEcho,
    FedStale,
    FedVARP,
    MRAsyncFL,
    RollingFedAvg,
    Scaffold,
    UFedAvg,
)
from afield.strategies.staleness import Polynomial
from afield.training.distill import Distil

# One row per strategy and variant that the battery runs; every registered key must appear.
BATTERY: dict[str, Any] = {
    "fedasync": FedAsync(weight=Polynomial(0.5), drops={7: 0.5}),
    "fedasync sqrt": FedAsync(decay="sqrt"),
    "mr-asyncfl": MRAsyncFL(),
    "mr-asyncfl int8": MRAsyncFL(precision="int8"),
    "twafl": TWAFL(),
    "twafl exp arrival": TWAFL(form="exp", stamp="arrival", by_examples=True),
    "rolling-fedavg": RollingFedAvg(),
    "asgd": ASGD(lr=0.5),
    "asgd tick": ASGD(lr=0.5, per="tick"),
    "delay-adaptive-asgd": DelayAdaptiveASGD(threshold=2),
    "delay-adaptive-asgd tick": DelayAdaptiveASGD(threshold=2, per="tick"),
    "fedbuff": FedBuff(size=3, weight=Polynomial(0.5)),
    "ca2fl": CA2FL(size=3),
    "fedbuff tick": FedBuff(size=4, per="tick"),
    "ca2fl tick": CA2FL(size=4, per="tick"),
    "ca2fl bfloat16": CA2FL(size=3, precision="bfloat16"),
    "fadas": FADAS(size=3, delay_threshold=1),
    "fedac": FedAC(size=3),
    "fedecho": FedEcho(size=3, samples=8, batch=4, rate=1e-3, keep=True),
    "ace": ACE(lr=0.5),
    "ace zeros": ACE(lr=0.5, warmup="zeros"),
    "ace int8": ACE(lr=0.5, precision="int8"),
    "ace client": ACE(lr=0.5, held="client"),
    "ace tick": ACE(lr=0.5, per="tick"),
    "aced": ACED(lr=0.5, max_delay=4),
    "aced tick": ACED(lr=0.5, max_delay=4, per="tick"),
    "fedavg": FedAvg(),
    "fedstale": FedStale(),
    "fedstale known": FedStale(beta=0.3, p=0.5, precision="int8"),
    "u-fedavg": UFedAvg(cutoff=3),
    "fedvarp": FedVARP(),
    "mifa": MIFA(),
    "scaffold": Scaffold(),
    "sgd": SGD(),
}

INPUTS = 4
CLASSES = 3


def network() -> nn.Module:
    """A linear layer under BatchNorm: 15 parameters (12 + 3) and 6 more of the norm, 6 statistics."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(INPUTS, CLASSES), nn.BatchNorm1d(CLASSES))


PARAMETERS = 21
SIZE = 27


@dataclass
class Play:
    """A server and its clients, in a state that can be deep-copied and played on from anywhere."""

    server: Server
    tasks: dict[int, Task]
    held: HeldDeltas
    beats: int = 0

    def beat(self) -> Receipt:
        """One arrival (or, for rounds and ticks, one round after every third arrival)."""
        server, beat = self.server, self.beats
        self.beats += 1
        client = self._who(beat)
        task = self.tasks.pop(client, None) or server.checkout(client, float(beat))
        trained = self._train(task)
        held = getattr(server.strategy, "client_held", False)
        sent = self.held.prepare(client, trained, server.base(task)) if held else None
        result = LocalResult(trained, examples=1 + client, steps=2, rate=0.1)
        receipt = server.submit(result.answer(task, float(beat), sent))
        if held:
            self.held.commit(client)
        if getattr(server.strategy, "pace", "arrival") == "arrival":
            self.tasks[client] = server.checkout(client, float(beat))
        elif beat % 3 == 2:
            server.close_round()
        return receipt

    def run(self, beats: int) -> list[Receipt]:
        return [self.beat() for _ in range(beats)]

    def _who(self, beat: int) -> int:
        clients = self.server.clients
        if getattr(self.server.strategy, "pace", "arrival") == "round":
            start = int(uniform(1, beat // 3) * clients)
            return (start + beat % 3) % clients  # distinct within a round
        # everyone once, then at random: warm-ups end
        return beat if beat < clients else int(uniform(2, beat) * clients)

    def _train(self, task: Task) -> Tensor:
        """A keyed stand-in for training: moves parameters at random, keeps variances positive."""
        base = self.server.base(task)
        move = torch.randn(base.shape, generator=generator(3, task.client, task.count), dtype=base.dtype)
        trained = base + 0.3 * move
        trained[PARAMETERS:] = move[PARAMETERS:].abs()
        correction = self.server.correction(task)
        if correction is not None:
            trained[: self.server.parameters] -= 0.2 * correction
        return trained


def play(
    strategy: Any,
    clients: int = 5,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    table: str = "memory",
    folder: Path | None = None,
) -> Play:
    module = network().to(dtype)
    vector = torch.cat([p.detach().flatten() for p in module.parameters()] + [torch.zeros(3), torch.ones(3)])
    unlabelled = torch.randn(8, INPUTS, generator=generator(9)).to(dtype)
    server = Server(
        strategy,
        vector.to(dtype),
        clients,
        parameters=PARAMETERS,
        seed=seed,
        distiller=Distil(module, unlabelled) if hasattr(strategy, "refine") else None,
    )
    server.keep_tables(table, folder)
    tasks = {}
    if getattr(strategy, "pace", "arrival") == "arrival":
        tasks = {client: server.checkout(client, 0.0) for client in range(clients)}
    return Play(server, tasks, HeldDeltas(server.parameters))


def tabled(strategy: Any) -> bool:
    """Whether its state has a table, at the latest after an update."""
    player = play(strategy)
    player.beat()
    return bool(list(tables(player.server.state)))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor and scalar of a state, by path; of a table the rows that were written, wherever they are."""
    if isinstance(value, ClientTable):
        yield f"{path}.precision", value.precision
        for client in range(len(value)):
            if value.has(client):
                yield f"{path}.{client}", value.row(client, torch.float64)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from leaves(getattr(value, name), f"{path}.{name}")
    else:
        yield path, value


def same(first: Any, second: Any) -> bool:
    """Bitwise equality of two states."""
    one, two = dict(leaves(first)), dict(leaves(second))
    if one.keys() != two.keys():
        return False
    for path, value in one.items():
        other = two[path]
        if isinstance(value, Tensor):
            if not torch.equal(value, other):
                return False
        elif value != other and not (isinstance(value, float) and math.isnan(value)):
            return False
    return True


def frozen(play: Play) -> Play:
    """A snapshot: everything that changes, copied; the strategy and the distiller are shared."""
    memo = {id(play.server.strategy): play.server.strategy, id(play.server.distiller): play.server.distiller}
    return copy.deepcopy(play, memo)
