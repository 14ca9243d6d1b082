"""A client's side of an experiment: the data and the training that its config names, or one's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afield.core.errors import InputError
from afield.core.types import LocalResult, Receipt, Task
from afield.experiments.config import Config, config
from afield.experiments.run import dealt, load_data
from afield.experiments.serve import own_module
from afield.runtimes.service.client import Client, RemoteTask
from afield.scenarios.data import ClientData
from afield.training.local import LoopTrainer
from afield.training.models import build

Train = Callable[[RemoteTask], LocalResult]


def by_config(table: Mapping[str, Any]) -> Train:
    """Train as the experiment's own clients do: the same data, dealt out in the same way, the same random numbers."""
    chosen: Config = config({key: value for key, value in table.items() if key != "own"})
    dataset, model, _ = load_data(chosen)
    parts, targets = dealt(chosen, dataset)
    module = build(model, tuple(dataset.inputs.shape[1:]), dataset.classes, chosen.seed)
    data = ClientData(dataset.inputs, targets, parts)
    return _by(LoopTrainer(module, data, chosen.local, chosen.seed, dataset.loss))


def by_own(table: Mapping[str, Any], model: str, folder: Path) -> Train:
    """Train one's own network on one's own examples, with the experiment's optimiser and its settings."""
    chosen = config({key: value for key, value in table.items() if key != "own"})
    inputs, targets = own_data(folder)
    trainer = LoopTrainer(own_module(model, chosen.seed), _Same(inputs, targets), chosen.local, chosen.seed)
    return _by(trainer)


def own_data(folder: Path) -> tuple[Tensor, Tensor]:
    """inputs.npy and targets.npy: arrays of equal length; integers as targets are classes."""
    import numpy as np

    found = []
    for name in ("inputs.npy", "targets.npy"):
        try:
            found.append(torch.from_numpy(np.load(folder / name, allow_pickle=False)))
        except (OSError, ValueError) as error:
            raise InputError(
                f"{folder / name} cannot be read ({error}): save an array there with numpy.save"
            ) from error
    inputs, targets = found
    if len(inputs) != len(targets) or not len(inputs):
        raise InputError(
            f"{folder} has {len(inputs)} inputs and {len(targets)} targets: give as many, and some"
        )
    return inputs.float(), targets.long() if not targets.is_floating_point() else targets


class _Same:
    """The same examples, whichever number the client has."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets
        self.sizes: Sequence[int] = _Repeated(len(inputs))

    def batch(self, client: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.inputs[positions], self.targets[positions]


class _Repeated(Sequence[int]):
    """A sequence that is the same number everywhere."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __getitem__(self, index: Any) -> Any:
        return self.value

    def __len__(self) -> int:
        return 1


def _by(trainer: LoopTrainer) -> Train:
    turn = threading.Lock()  # clients of one process take turns: a trainer has one network

    def train(task: RemoteTask) -> LocalResult:
        told = Task(task.number, task.client, task.count, task.version, task.started)
        with turn:
            return trainer.train([told], [task.base], [task.correction])[0]

    return train


def take_part(
    client: Client,
    train: Train,
    *,
    most: int | None = None,
    told: Callable[[Receipt], None] = lambda receipt: None,
) -> int:
    """Train task after task; gives how many updates were accepted."""
    accepted = 0
    for task in client.tasks(most):
        result = train(task)
        receipt = task.submit(
            result.model,
            examples=result.examples,
            steps=result.steps,
            rate=result.rate,
            metrics=result.metrics,
        )
        accepted += not receipt.refused
        told(receipt)
    return accepted
