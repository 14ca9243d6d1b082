"""A whole simulation from Python: strategy, module, clients' data, delays, and a result."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import data as torch_data

from afield.core.errors import InputError, closest
from afield.core.flat import Layout
from afield.core.protocols import Availability, Data, Delay, Evaluator, Scheduler, Strategy, Trainer
from afield.core.server import Server
from afield.core.types import Receipt, Scene
from afield.runtimes.diagnose import ObservedServer
from afield.runtimes.flow import Flow
from afield.runtimes.flows import FreeFlow, SampledFlow, TickFlow
from afield.runtimes.rounds import RoundFlow
from afield.runtimes.rows import Measurement
from afield.runtimes.simulator import Simulator
from afield.runtimes.terms import Manners, Measuring, Stop
from afield.scenarios.availability import Always
from afield.scenarios.data import ClientData, ListedData, client_data, pooled
from afield.scenarios.delays import Constant
from afield.scenarios.schedulers import All, Bernoulli, Cohort, SampledStaleness, Ticks
from afield.strategies import STRATEGIES
from afield.training.choose import Training, trainer
from afield.training.distill import Distil
from afield.training.evaluate import Evaluate
from afield.training.gradients import FullGradients
from afield.training.local import Local, check_fits

SMALL = 200_000  # parameters: below, a second thread costs more than it gives (digits MLP: 1.6 times slower)
SMALL_STACKED = 20_000  # the same where many models are trained at once
WIDEST = 256  # tasks trained in one call
ROOM = (
    2**31
)  # bytes that results not yet arrived may take; a constant, so that blocks never depend on the machine


@dataclass(frozen=True)
class Result:
    """What a simulation gives: the event log, the measurements, the trained module."""

    receipts: list[Receipt]
    metrics: list[dict[str, Any]]
    model: nn.Module
    ended: str
    clients: list[dict[str, Any]] = field(default_factory=list)  # per measurement, where the run is diagnosed

    @property
    def accuracy(self) -> float | None:
        """The last measured test accuracy."""
        return self.metrics[-1].get("accuracy") if self.metrics else None


def block_limit(size: int, itemsize: int = 4) -> int:
    """How many tasks may be trained ahead, by the size of the model."""
    return max(1, min(WIDEST, ROOM // (size * itemsize)))


def thread_count(size: int, method: str = "loop") -> int:
    """How many threads a run uses, by the size of the model and the way it is trained."""
    return 1 if size < (SMALL_STACKED if method == "vmap" else SMALL) else os.cpu_count() or 1


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use so many threads; it has as many as before at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assemble(
    strategy: Strategy,
    module: nn.Module,
    data: Data,
    *,
    stop: Stop,
    evaluator: Evaluator | None = None,
    unlabelled: Tensor | None = None,
    delay: Delay = Constant(),
    availability: Availability = Always(),
    scheduler: Scheduler | SampledStaleness | Ticks = All(),
    rounds: Bernoulli | Cohort = Cohort(),
    local: Local = Local(),
    loss: str = "cross-entropy",
    measuring: Measuring = Measuring(),
    manners: Manners = Manners(),
    training: Training = Training(),
    by: Trainer | None = None,
    seed: int = 0,
    block: int | None = None,
    device: str = "cpu",
) -> Simulator:
    """A simulator ready to run. Wiring only: every rule lives in the part that it belongs to.

    `by` is a trainer of your own in place of the one that `training` names.
    """
    if getattr(strategy, "pooled", False):
        data, scheduler = pooled(data), All()
    sizes = list(data.sizes)
    for client, size in enumerate(sizes):
        if size == 0:
            raise InputError(f"client {client} has no examples: give it some, or leave it out")
    scene = Scene(seed, sizes, [local.work(client, size) for client, size in enumerate(sizes)])
    flow, strategy = _flow(strategy, scheduler, rounds, scene)
    layout = Layout.of(module)
    initial = layout.flatten(module).to(device)
    options: dict[str, Any] = {
        "parameters": layout.parameters,
        "seed": seed,
        "max_staleness": manners.max_staleness,
        "distiller": None
        if unlabelled is None
        else Distil(
            module,
            unlabelled,
            device,
            getattr(strategy, "top", 64),
            training.precision,
            training.channels_last,
        ),
    }
    if measuring.diagnose:
        gradients = FullGradients(module, data, local, loss, device)
        server: Server = ObservedServer(strategy, initial, len(sizes), gradients=gradients, **options)
    else:
        server = Server(strategy, initial, len(sizes), **options)
    return Simulator(
        server,
        by if by is not None else trainer(module, data, local, seed, loss, device, training),
        flow,
        scene,
        delay=_whole(delay.bind(scene)) if isinstance(flow, TickFlow) else delay.bind(scene),
        presence=availability.bind(scene),
        stop=stop,
        evaluator=evaluator,
        measuring=measuring,
        manners=manners,
        block=block or block_limit(layout.size),
        diagnosis=server.diagnosis if isinstance(server, ObservedServer) else None,
    )


def simulate(
    strategy: Strategy | str,
    model: nn.Module,
    data: Sequence[torch_data.Dataset[Any]] | Data,
    *,
    test: torch_data.Dataset[Any] | tuple[Tensor, Tensor] | None = None,
    updates: int | None = None,
    versions: int | None = None,
    time: float | None = None,
    accuracy: float | None = None,
    measure_versions: int | None = None,
    measure_time: float | None = None,
    diagnose: bool = False,
    max_staleness: int | None = None,
    stale: str = "drop",
    reply: str = "after",
    offline: str = "pause",
    loss: str = "cross-entropy",
    device: str = "cpu",
    method: str = "auto",
    table: str = "auto",
    **parts: Any,
) -> Result:
    """Simulate a federation: any module, one data set per client.

    Ends at the first of `updates`, `versions`, `time` (virtual) or test `accuracy`. `method` says how local training
    is computed (training/choose.py), `table` where a vector per client is kept (core/places.py); `diagnose` also
    records why steps err (runtimes/diagnose.py). `parts` are the rest of the scenario, as for `assemble`: delay,
    availability, scheduler, rounds, local, unlabelled, training, seed, block. The module given is
    left as it is; the result holds a trained copy.
    """
    if isinstance(strategy, str):
        if strategy not in STRATEGIES:
            raise InputError(f"strategy {strategy!r} is not known{closest(strategy, STRATEGIES)}")
        strategy = cast(Strategy, STRATEGIES[strategy]())
    clients = data if hasattr(data, "batch") else client_data(data)
    _check(model, cast(Data, clients), loss)
    simulator = assemble(
        strategy,
        model,
        cast(Data, clients),
        stop=Stop(updates=updates, versions=versions, time=time, accuracy=accuracy),
        evaluator=None if test is None else _evaluator(model, test, loss, device),
        measuring=Measuring(versions=measure_versions, time=measure_time, diagnose=diagnose),
        manners=Manners(max_staleness=max_staleness, stale=stale, reply=reply, offline=offline),
        loss=loss,
        device=device,
        **{"training": Training(method), **parts},
    )
    simulator.server.keep_tables(table)
    receipts: list[Receipt] = []
    metrics: list[dict[str, Any]] = []
    of_clients: list[dict[str, Any]] = []
    with threads(thread_count(simulator.server.size, simulator.trainer.method)):
        for row in simulator.rows():
            if isinstance(row, Measurement):
                metrics.append(row.row())
                if row.clients is not None:
                    of_clients.append({"version": row.version, "time": row.time, **row.clients})
            else:
                receipts.append(row)
    trained = copy.deepcopy(model)
    Layout.of(trained).load(simulator.server.model().cpu(), trained)
    return Result(receipts, metrics, trained, simulator.ended, of_clients)


def _flow(
    strategy: Strategy,
    scheduler: Scheduler | SampledStaleness | Ticks,
    rounds: Bernoulli | Cohort,
    scene: Scene,
) -> tuple[Flow, Strategy]:
    """How this strategy's clients start, and the strategy with what its config left open filled in."""
    pace = getattr(strategy, "pace", "arrival")
    name = type(strategy).__name__
    plan: Any = rounds if pace == "round" else scheduler
    if (pace == "tick") != isinstance(plan, Ticks):
        remedy = (
            "use the scheduler 'ticks'" if pace == "tick" else "set per = 'tick', or use another scheduler"
        )
        raise InputError(f"{name} steps once per {pace}, the scheduler is {type(plan).__name__}: {remedy}")
    if isinstance(plan, All) and (size := getattr(strategy, "size", 0)) > scene.clients:
        raise InputError(
            f"strategy.size = {size} is above the {scene.clients} clients: such a buffer is refused, lower it"
        )
    if isinstance(plan, SampledStaleness) and (size := getattr(strategy, "size", 1)) > 1:
        raise InputError(
            f"strategy.size = {size}, but sampled-staleness draws one update per version: set size = 1, "
            "or use the scheduler 'concurrency'"
        )
    participation = rounds.participation(scene.clients) if pace == "round" else None
    if hasattr(strategy, "fitted"):
        strategy = strategy.fitted(plan.concurrency(scene.clients), participation)
    if pace == "round":
        return RoundFlow(rounds), strategy
    if isinstance(scheduler, SampledStaleness):
        return SampledFlow(scheduler), strategy
    bound = scheduler.bind(scene)
    return (TickFlow(bound) if pace == "tick" else FreeFlow(bound)), strategy


def _whole(delay: Callable[[int, int], float]) -> Callable[[int, int], float]:
    """Delays in whole server iterations, one at the least."""
    return lambda client, count: float(max(1, math.ceil(delay(client, count))))


def _check(model: nn.Module, data: Data, loss: str) -> None:
    """Fail before the first task, not in the middle of a run."""
    inputs, targets = data.batch(0, torch.arange(1))
    if isinstance(data, ClientData):
        targets = data.targets
    check_fits(model, inputs, int(targets.max()) + 1 if loss == "cross-entropy" else 1, loss)


def _evaluator(
    model: nn.Module, test: torch_data.Dataset[Any] | tuple[Tensor, Tensor], loss: str, device: str
) -> Evaluate:
    if isinstance(test, tuple):
        inputs, targets = test
    else:
        listed = ListedData([test])
        inputs, targets = listed.batch(0, torch.arange(listed.sizes[0]))
    classes = int(targets.max()) + 1 if loss == "cross-entropy" else 1
    return Evaluate(model, inputs, targets, classes, loss, device=device)
