"""What a run knows of its clients before it starts: how much data, of which classes, how slow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from afield.core.types import Scene
from afield.experiments.config import Config
from afield.scenarios.data import ClientData, Dataset

PROBES = 8  # tasks per client whose mean duration says who is fast
CELLS = 1_000_000  # numbers in clients.json; a run with more of them writes none


def durations(config: Config, data: ClientData) -> list[float]:
    """The mean duration of each client's first tasks."""
    work = [config.local.work(client, size) for client, size in enumerate(data.sizes)]
    duration = config.scenario.delay.bind(Scene(config.seed, data.sizes, work))
    return [sum(duration(client, count) for count in range(PROBES)) / PROBES for client in range(len(work))]


def people(config: Config, dataset: Dataset, data: ClientData, relabelled: bool) -> dict[str, Any] | None:
    """For clients.json: `examples`, `duration`, `labels` (examples per class; None where targets are no classes).

    `relabelled`: the partition changed labels, so that they mean different things to different clients.
    """
    labelled = dataset.loss == "cross-entropy"
    if len(data.parts) * (2 + dataset.classes * labelled) > CELLS:
        return None
    return {
        "examples": list(data.sizes),
        "duration": durations(config, data),
        "labels": [counts(data, [client], dataset.classes).tolist() for client in range(len(data.parts))]
        if labelled
        else None,
        "relabelled": relabelled,
    }


def halves(config: Config, dataset: Dataset, data: ClientData) -> dict[str, Tensor] | None:
    """The label mix of the faster and of the slower half of the clients."""
    if dataset.loss != "cross-entropy" or len(data.parts) < 2:
        return None
    means = durations(config, data)
    order = sorted(range(len(means)), key=lambda client: means[client])
    half = len(order) // 2
    mixes = {"fast": order[:half], "slow": order[half:]}
    found = {name: counts(data, clients, dataset.classes) for name, clients in mixes.items()}
    return {name: count / count.sum() for name, count in found.items()}


def counts(data: ClientData, clients: Sequence[int], classes: int) -> Tensor:
    """How many examples of each class these clients have."""
    labels = torch.cat([data.targets[data.parts[client]] for client in clients])
    return torch.bincount(labels, minlength=classes)
