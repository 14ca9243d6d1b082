"""A client's side of an experiment: the data and the training that its config names, or one's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from afield.core.types import LocalResult, Receipt, Task
from afield.experiments.config import Config, config
from afield.experiments.own import own_data, own_module
from afield.experiments.run import dealt, load_data
from afield.runtimes.service.client import Client, RemoteTask
from afield.scenarios.data import ClientData
from afield.training.local import LoopTrainer
from afield.training.models import build

Train = Callable[[RemoteTask], LocalResult]


def _config(table: Mapping[str, Any]) -> Config:
    """The server's config, less its rule: clients do not need it, and one of a file of its own would be run here."""
    return config({key: value for key, value in table.items() if key not in ("own", "strategy")})


def by_config(table: Mapping[str, Any]) -> Train:
    """Train as the experiment's own clients do: the same data, dealt out in the same way, the same random numbers."""
    chosen = _config(table)
    dataset, model, _ = load_data(chosen)
    parts, targets = dealt(chosen, dataset)
    module = build(model, tuple(dataset.inputs.shape[1:]), dataset.classes, chosen.seed)
    data = ClientData(dataset.inputs, targets, parts)
    return _by(LoopTrainer(module, data, chosen.local, chosen.seed, dataset.loss), module)


def by_own(table: Mapping[str, Any], model: str, folder: Path) -> Train:
    """Train one's own network on one's own examples, with the experiment's optimiser and its settings."""
    chosen = _config(table)
    inputs, targets = own_data(folder)
    module = own_module(model, chosen.seed)
    return _by(LoopTrainer(module, _Same(inputs, targets), chosen.local, chosen.seed), module)


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


def _by(trainer: LoopTrainer, module: nn.Module) -> Train:
    turn = threading.Lock()  # clients of one process take turns: a trainer has one network

    def train(task: RemoteTask) -> LocalResult:
        told = Task(task.number, task.client, task.count, task.version, task.started)
        with turn:
            task.fits(module)
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
