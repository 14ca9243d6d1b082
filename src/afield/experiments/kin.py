"""What runs that go together share: their data in one pool, one engine of training, one test set on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from afield.scenarios.data import ClientData, Dataset
from afield.training.block import BlockTrainer
from afield.training.evaluate import Evaluate


@dataclass(eq=False)
class Twins:
    """A pool with every example that a partition may relabel in it twice: as it is, and with its other label.

    So runs that relabel other examples, or more of them, still are shares of one pool.
    """

    dataset: Dataset
    inputs: Tensor
    targets: Tensor
    twin: Tensor  # where the other one of an example is

    @classmethod
    def of(cls, dataset: Dataset, others: Tensor) -> Twins:
        """`others`: the labels if every example that may be relabelled were."""
        members = (others != dataset.targets).nonzero().flatten()
        twin = torch.arange(len(others))
        twin[members] = len(others) + torch.arange(len(members))
        inputs = torch.cat([dataset.inputs, dataset.inputs[members]])
        return cls(dataset, inputs, torch.cat([dataset.targets, others[members]]), twin)

    def data(self, parts: list[Tensor], seen: Tensor) -> ClientData:
        """Clients with these examples and labels: the same batches in the same order as without twins."""
        changed = seen != self.dataset.targets
        place = torch.where(changed, self.twin, torch.arange(len(seen)))
        return ClientData(self.inputs, self.targets, [place[part] for part in parts])


@dataclass(eq=False)
class Kin:
    """Remembers what the runs prepared so far have made; a run that agrees in the key takes part in it."""

    trainers: dict[Any, BlockTrainer] = field(default_factory=dict)
    evaluators: dict[Any, Evaluate] = field(default_factory=dict)
    pools: dict[Any, Twins] = field(default_factory=dict)

    def data(self, dataset: Dataset, partition: Any, parts: list[Tensor], seen: Tensor) -> ClientData:
        """The clients' data as shares of a pool that does not depend on who got which label."""
        if not hasattr(partition, "others"):
            return ClientData(dataset.inputs, seen, parts)
        key = (dataset, type(partition), partition.pair)
        if key not in self.pools:
            self.pools[key] = Twins.of(dataset, partition.others(dataset.targets))
        return self.pools[key].data(parts, seen)

    def evaluator(self, key: Any, groups: dict[str, Tensor] | None) -> Evaluate | None:
        """One for these groups, where a run that agrees has been prepared."""
        return self.evaluators[key].sibling(groups) if key in self.evaluators else None

    def trainer(self, key: Any, data: ClientData, seed: int) -> BlockTrainer | None:
        """One for these clients, likewise."""
        return self.trainers[key].sibling(data, seed) if key in self.trainers else None
