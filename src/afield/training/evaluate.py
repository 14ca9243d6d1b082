"""Measures a model on a test set: loss, accuracy, accuracy per class and per group of clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from afield.core.errors import InputError, within
from afield.core.flat import own_copy
from afield.training.local import loss_function


class Evaluate:
    """Called with a whole vector, gives a dict that JSON can hold; works on a private copy of the module.

    - cross-entropy: "loss", "accuracy", "per_class" (None for a class that the test set lacks) and "groups";
    - mse: "loss";
    - value: "loss" and, for at most 4 parameters, "params".

    `groups` gives each group's label mix, one share per class. Its accuracy is the accuracy that the test
    set would show with that mix: the sum of share times per-class accuracy over the classes that the test
    set has, divided by the sum of those shares (None if it has none of them).
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        classes: int,
        loss: str = "cross-entropy",
        groups: Mapping[str, Tensor] | None = None,
        batch: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if batch is None:
            # On a CPU large activations are fresh pages every time: 1,000 took 1.4 (ResNet-18) to 1.9 times as long.
            batch = 1000 if torch.device(device).type == "cuda" else 100
        within("batch", batch, 1, math.inf)
        if len(inputs) == 0 or len(inputs) != len(targets):
            raise InputError(
                f"a test set of {len(inputs)} inputs and {len(targets)} targets: give one each, 1 or more"
            )
        self._loss, self._counts = loss_function(loss), loss == "cross-entropy"
        self._module, self._layout, self._vector = own_copy(module, device)
        self._module.eval()
        self._inputs, self._targets = inputs.to(device), targets.to(device)
        self._classes, self._batch = classes, batch
        self._shows_point = loss == "value" and self._layout.parameters <= 4
        self._totals = self._label_counts(targets) if self._counts else []
        self._groups = {name: self._shares(name, mix) for name, mix in (groups or {}).items()}

    def __call__(self, model: Tensor) -> dict[str, Any]:
        if model.shape != self._vector.shape:
            raise InputError(
                f"a vector of shape {tuple(model.shape)} is not a model of {len(self._vector)} elements"
            )
        self._vector.copy_(model)
        loss = torch.zeros((), dtype=torch.float64, device=self._vector.device)
        hits = torch.zeros(self._classes, dtype=torch.long, device=self._vector.device)
        with torch.no_grad():
            for start in range(0, len(self._inputs), self._batch):
                inputs = self._inputs[start : start + self._batch]
                targets = self._targets[start : start + self._batch]
                outputs = self._module(inputs)
                loss += self._loss(outputs, targets).double() * len(inputs)
                if self._counts:
                    right = targets[outputs.argmax(dim=1) == targets]
                    hits += torch.bincount(right, minlength=self._classes)
        found: dict[str, Any] = {"loss": float(loss) / len(self._inputs)}
        if self._counts:
            found |= self._accuracies(hits.tolist())
        if self._shows_point:
            found["params"] = self._vector[: self._layout.parameters].tolist()
        return found

    def _accuracies(self, hits: list[int]) -> dict[str, Any]:
        per_class = [hit / total if total else None for hit, total in zip(hits, self._totals, strict=True)]
        groups: dict[str, float | None] = {}
        for name, shares in self._groups.items():
            held = [(share, part) for share, part in zip(shares, per_class, strict=True) if part is not None]
            weight = sum(share for share, _ in held)
            groups[name] = sum(share * part for share, part in held) / weight if weight else None
        return {"accuracy": sum(hits) / sum(self._totals), "per_class": per_class, "groups": groups}

    def _label_counts(self, targets: Tensor) -> list[int]:
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= self._classes:
            raise InputError(
                f"test labels run from {low} to {high}, outside 0..{self._classes - 1}: "
                f"give classes = {high + 1}"
            )
        counts: list[int] = torch.bincount(targets, minlength=self._classes).tolist()
        return counts

    def _shares(self, name: str, mix: Tensor) -> list[float]:
        shares: list[float] = mix.double().tolist()
        if len(shares) != self._classes or min(shares) < 0 or sum(shares) <= 0:
            raise InputError(
                f"group {name!r} has the label mix {shares}: give {self._classes} shares >= 0, not all 0"
            )
        return shares
