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
from afield.core.types import Receipt, Scene
from afield.experiments.config import Config, Source
from afield.experiments.folder import RunFolder
from afield.runtimes.simulate import assemble, block_limit, thread_count, threads
from afield.runtimes.simulator import Measurement, Simulator
from afield.scenarios.data import ClientData, Dataset
from afield.training.evaluate import Evaluate
from afield.training.local import check_fits
from afield.training.models import build

PROBES = 8  # tasks per client whose mean duration says who is fast


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to go, with every choice that a rule makes written into its config."""

    config: Config
    module: nn.Module
    simulator: Simulator


def prepare(config: Config) -> Prepared:
    """Load the data, deal it out, build the model, wire the simulator; bad input ends here."""
    scenario = config.scenario
    device = config.runtime.device
    if device != "cpu" and not torch.cuda.is_available():
        raise InputError(f'runtime.device = {device!r}, but torch sees no CUDA device: use device = "cpu"')
    dataset = _load(cast(Any, scenario.data), config.seed)
    parts, targets = scenario.partition.split(dataset.targets, scenario.clients, config.seed)
    data = ClientData(dataset.inputs, targets, parts)
    module = build(config.model, tuple(dataset.inputs.shape[1:]), dataset.classes, config.seed)
    check_fits(module, dataset.inputs[:1], dataset.classes, dataset.loss)
    layout = Layout.of(module)
    count = config.runtime.threads or thread_count(layout.size)
    block = config.runtime.block or block_limit(layout.size)
    config = replace(config, runtime=replace(config.runtime, threads=count, block=block))
    evaluator = Evaluate(
        module,
        dataset.test_inputs,
        dataset.test_targets,
        dataset.classes,
        dataset.loss,
        groups=_groups(config, dataset, data),
        device=device,
    )
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
        seed=config.seed,
        block=block,
        device=device,
    )
    return Prepared(config, module, simulator)


def run(prepared: Prepared, folder: Path) -> Generator[Receipt | Measurement]:
    """Run into a new folder, yielding each row after it was written."""
    config, simulator = prepared.config, prepared.simulator
    written = RunFolder(folder, config.toml())
    finished = False
    try:
        with threads(config.runtime.threads or 1):
            for row in simulator.rows():
                if isinstance(row, Measurement):
                    written.metric(row.row())
                else:
                    written.receipt(row)
                yield row
        finished = True
    finally:
        module = prepared.module
        if finished:
            Layout.of(module).load(simulator.server.model().cpu(), module)
        written.close(module if finished else None)


@lru_cache(maxsize=1)
def _load(source: Source, seed: int) -> Dataset:
    """The runs of an experiment mostly share their data: it is read once for all with one seed."""
    return source.load(seed)


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
