"""What clients.json says, against the data dealt out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from afield.experiments import people as module
from afield.experiments.config import config
from afield.experiments.people import durations, halves, people
from afield.scenarios.data import ClientData, Dataset

TARGETS = torch.tensor([0, 0, 1, 2, 2, 2])
PARTS = [torch.tensor([0, 2]), torch.tensor([1, 3, 4, 5])]


def scene(loss: str = "cross-entropy") -> tuple[Any, Dataset, ClientData]:
    inputs = torch.zeros(6, 1)
    table = {
        "label": "x",
        "strategy": {"name": "fedbuff"},
        "scenario": {"clients": 2, "delay": {"name": "constant"}},
    }
    data = ClientData(inputs, TARGETS, PARTS)
    return config(table), Dataset(inputs, TARGETS, inputs, TARGETS, 3, loss=loss), data


def test_examples_labels_and_durations() -> None:
    chosen, dataset, data = scene()
    told = people(chosen, dataset, data, relabelled=False)
    assert told == {
        "examples": [2, 4],
        "duration": durations(chosen, data),
        "labels": [[1, 1, 0], [1, 0, 3]],
        "relabelled": False,
    }
    assert told["duration"][0] == told["duration"][1]  # constant delays
    mixes = halves(chosen, dataset, data)
    assert mixes is not None
    assert mixes["slow"].tolist() == [0.25, 0.0, 0.75]


def test_without_classes_there_are_no_labels() -> None:
    told = people(*scene("mse"), relabelled=False)
    assert told is not None
    assert told["labels"] is None


def test_too_many_clients_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CELLS", 10)  # two clients have 2 * (2 + 3)
    assert people(*scene(), relabelled=False) is not None
    monkeypatch.setattr(module, "CELLS", 9)
    assert people(*scene(), relabelled=False) is None
