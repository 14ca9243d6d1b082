"""From a config to a run folder."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from afield.core.errors import InputError
from afield.core.flat import Layout
from afield.core.protocols import Trainer
from afield.core.types import Receipt, Scene
from afield.experiments.config import Config, Source
from afield.experiments.costs import Tally, Timed
from afield.experiments.folder import RunFolder
from afield.experiments.kin import Kin
from afield.experiments.texts import More, tokenised
from afield.runtimes.ray import RayTrainer
from afield.runtimes.simulate import assemble, block_limit, thread_count, threads
from afield.runtimes.simulator import Measurement, Simulator
from afield.scenarios.data import ClientData, Dataset, pooled
from afield.scenarios.texts import Texts
from afield.training.block import BlockTrainer
from afield.training.evaluate import Evaluate
from afield.training.local import check_fits
from afield.training.models import Model, build

PROBES = 8  # tasks per client whose mean duration says who is fast


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to go, with every choice that a rule makes written into its config."""

    config: Config
    module: nn.Module
    simulator: Simulator


def prepare(config: Config, kin: Kin | None = None) -> Prepared:
    """Load the data, deal it out, build the model, wire the simulator; bad input ends here.

    `kin` remembers what runs that are to be trained together share: those that fit have one engine.
    """
    scenario = config.scenario
    device = config.runtime.device
    if device != "cpu" and not torch.cuda.is_available():
        raise InputError(f'runtime.device = {device!r}, but torch sees no CUDA device: use device = "cpu"')
    dataset, model, more = load_data(config)
    parts, targets = dealt(config, dataset)
    if kin is None:
        data = ClientData(dataset.inputs, targets, parts)
    else:
        data = kin.data(dataset, scenario.partition, parts, targets)
    module = build(model, tuple(dataset.inputs.shape[1:]), dataset.classes, config.seed)
    check_fits(module, dataset.inputs[:1], dataset.classes, dataset.loss)
    layout = Layout.of(module)
    block = config.runtime.block or block_limit(layout.size)
    groups = _groups(config, dataset, data)
    alike = (dataset, config.model, config.training, device)
    if kin is not None and alike in kin.evaluators:
        evaluator = kin.evaluators[alike].sibling(groups)
    else:
        evaluator = Evaluate(
            module,
            dataset.test_inputs,
            dataset.test_targets,
            dataset.classes,
            dataset.loss,
            groups=groups,
            device=device,
            precision=config.training.precision,
            channels_last=config.training.channels_last,
            more=more,
        )
    # a label that a partition has changed makes another pool, unless that has room for both
    pool = (id(data.inputs), id(data.targets))
    key = (pool, dataset.loss, config.model, config.local, config.training, device)
    trainers = {} if kin is None or getattr(config.strategy, "pooled", False) else kin.trainers
    by: Trainer | None = trainers[key].sibling(data, config.seed) if key in trainers else None
    actors = None
    if config.runtime.name == "ray":
        by = on_ray(config, module, data, dataset.loss)
        actors = by.crew.count
    simulator = assemble(
        config.strategy,
        module,
        data,
        stop=config.stop,
        evaluator=evaluator,
        unlabelled=dataset.unlabelled,
        delay=scenario.delay,
        availability=scenario.availability,
        scheduler=cast(Any, scenario.scheduler),
        rounds=cast(Any, scenario.rounds),
        local=config.local,
        loss=dataset.loss,
        measuring=config.measure,
        manners=config.server,
        training=config.training,
        by=by,
        seed=config.seed,
        block=block,
        device=device,
    )
    if simulator.server.refines and simulator.server.distiller is not None:
        simulator.server.distiller = Timed(simulator.server.distiller)
    if kin is not None:
        kin.evaluators.setdefault(alike, evaluator)
    if isinstance(simulator.trainer, BlockTrainer):
        trainers.setdefault(key, simulator.trainer)
    method = simulator.trainer.method
    count = config.runtime.threads or thread_count(layout.size, method)
    config = replace(
        config,
        training=config.training.by(method),
        runtime=replace(config.runtime, threads=count, block=block, actors=actors),
    )
    return Prepared(config, module, simulator)


def on_ray(config: Config, module: nn.Module, data: ClientData, loss: str) -> RayTrainer:
    """The trainer of a run whose tasks are trained all over a cluster."""
    seen = pooled(data) if getattr(config.strategy, "pooled", False) else data
    where = config.runtime
    return RayTrainer(
        module,
        seen,
        config.local,
        config.seed,
        loss,
        where.device,
        config.training,
        address=where.address,
        actors=where.actors,
        cpus=where.cpus,
    )


def run(prepared: Prepared, folder: Path) -> Generator[Receipt | Measurement]:
    """Run into a new folder, yielding each row after it was written."""
    with written(prepared, folder) as write, threads(prepared.config.runtime.threads or 1):
        for row in prepared.simulator.rows():
            write(row)
            yield row


@contextmanager
def written(
    prepared: Prepared, folder: Path, together: int = 1
) -> Generator[Callable[[Receipt | Measurement], None]]:
    """A new run folder: gives a function that takes its rows; ends with the summary where the run came to its end."""
    runtime = prepared.config.runtime
    into = RunFolder(folder, prepared.config.toml(), runtime.receipts)
    tally = Tally(prepared.simulator, together)

    def write(row: Receipt | Measurement) -> None:
        if isinstance(row, Measurement):
            into.metric(row.row())
            if row.clients is not None:
                into.diagnosis({"version": row.version, "time": row.time, **row.clients})
        else:
            tally.add(row)
            into.receipt(row)

    finished = False
    try:
        yield write
        finished = True
    finally:
        module = prepared.module
        if finished and runtime.model:
            Layout.of(module).load(prepared.simulator.server.model().cpu(), module)
        into.close(module if finished and runtime.model else None, tally.summary() if finished else None)


def load_data(config: Config) -> tuple[Dataset, Model, More | None]:
    """The data set of a config, the model that takes it, and what evaluation measures beside the loss."""
    source = cast(Any, config.scenario.data)
    reads = cast(Any, config.model) if hasattr(config.model, "reader") else None
    found = _load(source, config.seed if getattr(source, "keyed", True) else 0, reads)
    return found if isinstance(found, tuple) else (found, config.model, None)


@lru_cache(maxsize=2)  # a figure may be about two data sets
def _load(source: Source, seed: int, reads: Model | None) -> Dataset | tuple[Dataset, Model, More | None]:
    """The runs of an experiment mostly share their data: it is read once for all with one seed.

    Texts depend on the model that reads them as well, and come with what its tokeniser adds.
    """
    found = source.load(seed)
    return tokenised(found, reads) if isinstance(found, Texts) else found


def dealt(config: Config, dataset: Dataset) -> tuple[list[Tensor], Tensor]:
    """Who has which examples, and the targets as the clients see them."""
    split, count = config.scenario.partition.split, config.scenario.clients
    if dataset.sources is None:
        return split(dataset.targets, count, config.seed)
    parts, seen = split(dataset.sources, count, config.seed)
    if seen is not dataset.sources:
        name = type(config.scenario.partition).__name__
        raise InputError(
            f"partition {name} changes labels, and these texts have none: choose iid or dirichlet"
        )
    return parts, dataset.targets


def _groups(config: Config, dataset: Dataset, data: ClientData) -> dict[str, Tensor] | None:
    """The label mix of the faster and of the slower half of the clients."""
    if dataset.loss != "cross-entropy" or len(data.parts) < 2:
        return None
    work = [config.local.work(client, size) for client, size in enumerate(data.sizes)]
    duration = config.scenario.delay.bind(Scene(config.seed, data.sizes, work))
    means = [sum(duration(client, count) for count in range(PROBES)) for client in range(len(data.parts))]
    order = sorted(range(len(means)), key=lambda client: means[client])
    half = len(order) // 2
    return {
        "fast": _mix(data, order[:half], dataset.classes),
        "slow": _mix(data, order[half:], dataset.classes),
    }


def _mix(data: ClientData, clients: list[int], classes: int) -> Tensor:
    labels = torch.cat([data.targets[data.parts[client]] for client in clients])
    counts = torch.bincount(labels, minlength=classes)
    return counts / counts.sum()
