"""Measures a model on a test set: loss, accuracy, accuracy per class and per group of clients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from afield.core.errors import InputError, within
from afield.core.flat import own_copy
from afield.training.choose import convolutional
from afield.training.cuda import recorded
from afield.training.local import IGNORED, loss_function


class Later(Mapping[str, Any]):
    """What a GPU is still at: whoever reads it waits."""

    def __init__(self, find: Callable[[], dict[str, Any]]) -> None:
        self._find: Callable[[], dict[str, Any]] | None = find
        self._found: dict[str, Any] = {}

    def _all(self) -> dict[str, Any]:
        if self._find is not None:
            self._found, self._find = self._find(), None
        return self._found

    def __getitem__(self, name: str) -> Any:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


class Evaluate:
    """Called with a whole vector, gives what JSON can hold, by name; works on a private copy of the module.

    - cross-entropy: "loss", "accuracy", "per_class" (None for a class that the test set lacks) and "groups";
    - mse: "loss";
    - tokens: "loss", the mean over all tokens that are to be guessed, and "perplexity";
    - value: "loss" and, for at most 4 parameters, "params".

    `groups` gives each group's label mix, one share per class. Its accuracy is the accuracy that the test
    set would show with that mix: the sum of share times per-class accuracy over the classes that the test
    set has, divided by the sum of those shares (None if it has none of them). `more` measures further things of
    the module, as a dict.
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
        precision: str = "float32",
        channels_last: bool = False,
        more: Callable[[nn.Module], dict[str, Any]] | None = None,
    ) -> None:
        if batch is None and loss == "tokens":
            batch = 8  # a score per token of the vocabulary and place: 100 texts of Qwen's would take 31 GB
        if batch is None:
            # On a CPU large activations are fresh pages every time: 1,000 took 1.4 (ResNet-18) to 1.9 times as long.
            batch = 1000 if torch.device(device).type == "cuda" else 100
        within("batch", batch, 1, math.inf)
        if len(inputs) == 0 or len(inputs) != len(targets):
            raise InputError(
                f"a test set of {len(inputs)} inputs and {len(targets)} targets: give one each, 1 or more"
            )
        self._loss, self._counts = loss_function(loss), loss == "cross-entropy"
        self._more, self._tokens = more, loss == "tokens"
        guessed = (
            (targets != IGNORED).sum(dim=1) if self._tokens else torch.ones(len(targets), dtype=torch.long)
        )
        self._weights: list[int] = [int(part.sum()) for part in torch.split(guessed, batch)]  # of each batch
        self._module, self._layout, self._vector = own_copy(module, device)
        self._module.eval()
        self._inputs, self._targets = inputs.to(device), targets.to(device)
        if self._vector.device.type == "cpu":
            self._inputs = self._quicker()
        elif channels_last and inputs.ndim == 4:
            self._inputs = self._inputs.contiguous(memory_format=torch.channels_last)
        self._half = precision == "bfloat16"
        self._found = torch.zeros(1 + classes, dtype=torch.float64, device=device)
        self._passes: Callable[[], None] | None = None
        self._classes, self._batch = classes, batch
        self._shows_point = loss == "value" and self._layout.parameters <= 4
        self._totals = self._label_counts(targets) if self._counts else []
        self._groups = {name: self._shares(name, mix) for name, mix in (groups or {}).items()}

    def _quicker(self) -> Tensor:
        """The images in channels-last memory, where the model takes them so and gives what it gave.

        A CPU's convolutions and poolings are quicker there: a pass takes 0.8 (ResNet-18), 0.63 (FedAsync's CNN), 0.57
        (cifar-cnn) and 0.4 (mnist-cnn) of the time. A model that flattens by `view` does not take them.
        """
        if self._inputs.ndim != 4 or not convolutional(self._module):
            return self._inputs
        # by a copy, as torch leaves one channel in the order it is in
        last = self._inputs.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format)
        found = last.permute(0, 3, 1, 2)
        with torch.no_grad():
            right = self._module(self._inputs[:2])
            try:
                given = self._module(found[:2])
            except RuntimeError:
                return self._inputs
        same = given.shape == right.shape and torch.allclose(given, right, rtol=1e-3, atol=1e-4)
        return found if same else self._inputs

    def sibling(self, groups: Mapping[str, Tensor] | None) -> Evaluate:
        """The same for another run with its own groups: test set, module and graph are shared.

        Each measurement is complete, or queued behind the one before, when the next begins.
        """
        if self._passes is None:
            self._passes = recorded(self._measure, self._vector.device, "evaluation")
        other = copy.copy(self)
        other._groups = {name: self._shares(name, mix) for name, mix in (groups or {}).items()}
        return other

    def __call__(self, model: Tensor) -> Mapping[str, Any]:
        if model.shape != self._vector.shape:
            raise InputError(
                f"a vector of shape {tuple(model.shape)} is not a model of {len(self._vector)} elements"
            )
        self._vector.copy_(model)
        if self._passes is None:
            self._passes = recorded(self._measure, self._vector.device, "evaluation")
        self._passes()
        point = self._vector[: self._layout.parameters].clone() if self._shows_point else None
        if self._more is not None:
            return self._told(self._found, point) | self._more(self._module)
        if self._vector.device.type == "cpu":
            return self._told(self._found, point)
        return Later(partial(self._told, self._found.clone(), point))

    def _told(self, sums: Tensor, point: Tensor | None) -> dict[str, Any]:
        loss, *hits = sums.tolist()  # one look: each would make a GPU wait
        found: dict[str, Any] = {"loss": loss / max(1, sum(self._weights))}
        if self._tokens:
            found["perplexity"] = math.exp(found["loss"]) if found["loss"] < 700 else math.inf
        if self._counts:
            found |= self._accuracies([int(hit) for hit in hits])
        if point is not None:
            found["params"] = point.tolist()
        return found

    def _measure(self) -> None:
        """The sum of losses and the hits per class, into `_found`."""
        self._found.zero_()
        cast = torch.autocast(self._vector.device.type, torch.bfloat16, enabled=self._half)
        with torch.no_grad(), cast:
            for start, weight in zip(range(0, len(self._inputs), self._batch), self._weights, strict=True):
                inputs = self._inputs[start : start + self._batch]
                targets = self._targets[start : start + self._batch]
                outputs = self._module(inputs).to(self._layout.dtype)
                self._found[0] += self._loss(outputs, targets).double() * weight
                if self._counts:
                    right = (outputs.argmax(dim=1) == targets).double()
                    self._found[1:].index_add_(0, targets, right)

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
