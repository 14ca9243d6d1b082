"""From a config to a run folder."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from afield.core.errors import InputError
from afield.core.flat import Layout
from afield.core.places import choose
from afield.core.protocols import Trainer
from afield.core.types import Receipt
from afield.experiments.config import Config, Source
from afield.experiments.costs import Timed
from afield.experiments.folder import STORE
from afield.experiments.keep import Asking, Record, StoppedError, kept
from afield.experiments.kin import Kin
from afield.experiments.people import halves, people
from afield.experiments.texts import More, tokenised
from afield.experiments.trackers import check
from afield.runtimes.ray import RayTrainer
from afield.runtimes.rows import Measurement
from afield.runtimes.simulate import assemble, block_limit, thread_count, threads
from afield.runtimes.simulator import Simulator, Wanted
from afield.scenarios.data import ClientData, Dataset, pooled
from afield.scenarios.texts import Texts
from afield.training.block import BlockTrainer
from afield.training.choose import choose as method_for
from afield.training.evaluate import Evaluate
from afield.training.local import check_fits
from afield.training.models import Model, build


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to go, with every choice that a rule makes written into its config."""

    config: Config
    module: nn.Module
    simulator: Simulator
    people: dict[str, Any] | None = None  # what clients.json says

    def record(self, folder: Path, together: int = 1) -> Record:
        return Record(self.config, self.module, self.simulator, folder, together, self.people)


def prepare(config: Config, kin: Kin | None = None) -> Prepared:
    """Load the data, deal it out, build the model, wire the simulator; bad input ends here.

    `kin` remembers what runs that are to be trained together share: those that fit have one engine.
    """
    scenario, device = config.scenario, config.runtime.device
    if device != "cpu" and not torch.cuda.is_available():
        raise InputError(f'runtime.device = {device!r}, but torch sees no CUDA device: use device = "cpu"')
    check(config.log)
    dataset, model, more = load_data(config)
    parts, targets = dealt(config, dataset)
    data = ClientData(dataset.inputs, targets, parts)
    if kin is not None:
        data = kin.data(dataset, scenario.partition, parts, targets)
    module = build(model, tuple(dataset.inputs.shape[1:]), dataset.classes, config.seed)
    check_fits(module, dataset.inputs[:1], dataset.classes, dataset.loss)
    layout = Layout.of(module)
    block = config.runtime.block or block_limit(layout.size)
    known = Kin() if kin is None else kin
    # by what "auto" stands for, as the config of a run that is taken up names it
    training = config.training
    if training.method == "auto":
        training = training.by(method_for(module, device))
    groups, tests = halves(config, dataset, data), (dataset, config.model, training, device)
    evaluator = known.evaluator(tests, groups) or _evaluator(config, dataset, module, groups, more)
    known.evaluators.setdefault(tests, evaluator)
    # a label that a partition has changed makes another pool, unless that has room for both
    pool = (id(data.inputs), id(data.targets))
    key = (pool, dataset.loss, config.model, config.local, training, device)
    alike = not getattr(config.strategy, "pooled", False)
    by: Trainer | None = known.trainer(key, data, config.seed) if alike else None
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
    if alike and isinstance(simulator.trainer, BlockTrainer):
        known.trainers.setdefault(key, simulator.trainer)
    method = simulator.trainer.method
    count = config.runtime.threads or thread_count(layout.size, method)
    table = choose(config.runtime.table, simulator.server.state)
    config = replace(
        config,
        training=config.training.by(method),
        runtime=replace(config.runtime, threads=count, block=block, table=table, actors=actors),
    )
    told = people(config, dataset, data, relabelled=targets is not dataset.targets)
    return Prepared(config, module, simulator, told)


def _evaluator(
    config: Config, dataset: Dataset, module: nn.Module, groups: dict[str, Tensor] | None, more: More | None
) -> Evaluate:
    return Evaluate(
        module,
        dataset.test_inputs,
        dataset.test_targets,
        dataset.classes,
        dataset.loss,
        groups=groups,
        device=config.runtime.device,
        precision=config.training.precision,
        channels_last=config.training.channels_last,
        more=more,
    )


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


def run(
    prepared: Prepared, folder: Path, *, again: bool = False, asking: Asking | None = None
) -> Generator[Receipt | Measurement]:
    """Run into a new folder, yielding each row after it was written.

    `again`: go on in a folder whose run was stopped. `asking`: stops where that is asked, all saved.
    """
    simulator, record = prepared.simulator, prepared.record(folder)
    with (
        kept([record], folder / STORE, again) as keeping,
        threads(prepared.config.runtime.threads or 1),
    ):
        for row in simulator.walk():
            if isinstance(row, Wanted):  # before a block: the fewest results are waiting
                keeping.save()
            else:
                record.write(row)
                yield row
            if asking is not None and asking.asked and simulator.still:
                keeping.save()
                raise StoppedError
            simulator.pausing = keeping.due()
        record.close(finished=True)


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
