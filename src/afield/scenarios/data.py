"""What there is to learn: the sources of data by name, and the clients' view of what they hold."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import data as torch_data

from afield.core.errors import InputError
from afield.core.protocols import Data
from afield.scenarios.dataset import Dataset
from afield.scenarios.images import CIFAR10, CIFAR100, MNIST, Digits, FashionMNIST, Synthetic
from afield.scenarios.phrases import SyntheticTexts
from afield.scenarios.quadratic import Quadratic
from afield.scenarios.texts import GSM8K, MRPC, MathInstruct, Newsgroups

__all__ = ["DATA", "ClientData", "Dataset", "Digits", "ListedData", "Quadratic", "client_data", "pooled"]


@dataclass(eq=False)
class ClientData:
    """Clients' data as indices into one pool of tensors."""

    inputs: Tensor
    targets: Tensor
    parts: list[Tensor]

    @cached_property
    def sizes(self) -> list[int]:
        return [len(part) for part in self.parts]

    def batch(self, client: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        index = self.parts[client][positions]
        return self.inputs[index], self.targets[index]


@dataclass(eq=False)
class ListedData:
    """Clients' data as one torch data set of (input, target) per client; batches are collated by torch."""

    datasets: Sequence[torch_data.Dataset[Any]]

    @cached_property
    def sizes(self) -> list[int]:
        return [len(dataset) for dataset in self.datasets]  # type: ignore[arg-type]

    def batch(self, client: int, positions: Tensor) -> tuple[Any, Tensor]:
        dataset = self.datasets[client]
        collated = torch_data.default_collate([dataset[position] for position in positions.tolist()])
        if not isinstance(collated, list | tuple) or len(collated) != 2:
            raise InputError(f"client {client}'s examples are not pairs; its data must give (input, target)")
        return collated[0], collated[1]


def client_data(datasets: Sequence[torch_data.Dataset[Any]]) -> Data:
    """One torch data set per client as `Data`; tensors are pooled, which is what fast training wants."""
    if not datasets:
        raise InputError("no data sets; give one per client")
    for client, dataset in enumerate(datasets):
        if not hasattr(dataset, "__len__") or not len(dataset):
            raise InputError(f"client {client}'s data set has no length or no examples; leave the client out")
    tensors = [d.tensors for d in datasets if isinstance(d, torch_data.TensorDataset) and len(d.tensors) == 2]
    alike = {(x.shape[1:], x.dtype, y.shape[1:], y.dtype) for x, y in tensors}
    if len(tensors) < len(datasets) or len(alike) > 1:
        return ListedData(list(datasets))
    ends = torch.tensor([len(x) for x, _ in tensors]).cumsum(0)
    inputs, targets = (torch.cat(part) for part in zip(*tensors, strict=True))
    return ClientData(inputs, targets, list(torch.arange(len(targets)).tensor_split(ends[:-1])))


class _Rows(torch_data.Dataset[tuple[Any, Tensor]]):
    """Every client's examples, one after the other."""

    def __init__(self, data: Data) -> None:
        self.data, self.ends = data, list(itertools.accumulate(data.sizes))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        client = bisect.bisect_right(self.ends, index)
        position = index - self.ends[client] + self.data.sizes[client]
        inputs, targets = self.data.batch(client, torch.tensor([position]))
        one = {k: v[0] for k, v in inputs.items()} if isinstance(inputs, Mapping) else inputs[0]
        return one, targets[0]


def pooled(data: Data) -> Data:
    """One client that has everything, in the clients' order (the `sgd` strategy)."""
    if isinstance(data, ClientData):
        return ClientData(data.inputs, data.targets, [torch.cat(data.parts)])
    return ListedData([_Rows(data)])


DATA = {
    "digits": Digits,
    "mnist": MNIST,
    "fashion-mnist": FashionMNIST,
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
    "synthetic": Synthetic,
    "synthetic-texts": SyntheticTexts,
    "quadratic": Quadratic,
    "mrpc": MRPC,
    "newsgroups": Newsgroups,
    "gsm8k": GSM8K,
    "mathinstruct": MathInstruct,
}
