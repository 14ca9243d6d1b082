"""The networks of the papers, and a few plain ones; each config builds its module for a shape and classes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from afield.core.errors import InputError, one_of, within
from afield.core.keys import Stream, mix
from afield.training.text import Bert, CausalLm, DistilBert


class Model(Protocol):
    """A config that builds a module for examples of a shape."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module: ...


def build(model: Model, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """The module with its initial values: a function of the seed, which leaves torch's own stream alone."""
    within("classes", classes, 1, math.inf)
    state = torch.default_generator.get_state()
    try:
        # The generator itself: torch.manual_seed would also seed every GPU's stream.
        torch.default_generator.manual_seed(mix(seed, Stream.MODEL) >> 1)
        return model.build(tuple(shape), classes)
    finally:
        torch.default_generator.set_state(state)


@dataclass(frozen=True)
class Linear:
    """One linear layer over the flattened input (logistic regression)."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


@dataclass(frozen=True)
class Mlp:
    """Linear layers with ReLU between them; `hidden` lists the widths."""

    hidden: tuple[int, ...] = (64,)

    def __post_init__(self) -> None:
        for width in self.hidden:
            within("hidden", width, 1, math.inf)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        width = math.prod(shape)
        for wider in self.hidden:
            layers += [nn.Linear(width, wider), nn.ReLU()]
            width = wider
        return nn.Sequential(*layers, nn.Linear(width, classes))


@dataclass(frozen=True)
class MnistCnn:
    """FedStale's network for MNIST: two 3x3 convolutions, two linear layers; 421,642 weights at 1x28x28."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = _image("mnist-cnn", shape, 4)
        return nn.Sequential(
            *(nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(64 * (height // 4) * (width // 4), 128), nn.ReLU()),
            nn.Linear(128, classes),
        )


@dataclass(frozen=True)
class CifarCnn:
    """FedStale's network for CIFAR: two 5x5 convolutions, two linear layers; 3,353,034 weights at 3x32x32."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = _image("cifar-cnn", shape, 16)
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
        return nn.Sequential(
            *(nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(64 * rows * columns, 2048), nn.ReLU()),
            nn.Linear(2048, classes),
        )


@dataclass(frozen=True)
class FedAsyncCnn:
    """FedAsync's network (table 2): four convolutions, batch norm, dropout; 2,625,866 weights at 3x24x24."""

    dropout: float = 0.25

    def __post_init__(self) -> None:
        within("dropout", self.dropout, 0, 1, below=True)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = _image("fedasync-cnn", shape, 4)

        def convolution(before: int, after: int) -> list[nn.Module]:
            # ReLU, then batch norm: the table's order.
            return [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(after)]

        module = nn.Sequential(
            *(*convolution(channels, 64), *convolution(64, 64), nn.MaxPool2d(2), nn.Dropout(self.dropout)),
            *(*convolution(64, 128), *convolution(128, 128), nn.MaxPool2d(2), nn.Dropout(self.dropout)),
            *(nn.Flatten(), nn.Linear(128 * (height // 4) * (width // 4), 512), nn.ReLU()),
            *(nn.Dropout(self.dropout), nn.Linear(512, classes)),
        )
        for part in module:
            if isinstance(part, (nn.Conv2d, nn.Linear)):  # the authors' code starts from Xavier, biases zero
                nn.init.xavier_uniform_(part.weight)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)
        return module


@dataclass(frozen=True)
class ResNet18:
    """ResNet-18 for small images (3x3 stem, no max-pool); `norm` is batch, or group with `groups` groups."""

    norm: str = "batch"
    groups: int = 32

    def __post_init__(self) -> None:
        one_of("norm", self.norm, ("batch", "group"))
        if self.groups < 1 or 64 % self.groups:
            raise InputError(
                f"groups = {self.groups} does not divide 64 channels: take 1, 2, 4, 8, 16, 32 or 64"
            )

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, _, _ = _image("resnet18", shape, 1)
        blocks: list[nn.Module] = []
        before = 64
        for after, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [_Residual(before, after, stride, self), _Residual(after, after, 1, self)]
            before = after
        module = nn.Sequential(
            *(nn.Conv2d(channels, 64, 3, padding=1, bias=False), self.over(64), nn.ReLU()),
            *blocks,
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)),
        )
        for part in module.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
        return module

    def over(self, channels: int) -> nn.Module:
        """The normalisation of this many channels."""
        return nn.BatchNorm2d(channels) if self.norm == "batch" else nn.GroupNorm(self.groups, channels)


class _Residual(nn.Module):
    """Two 3x3 convolutions beside the identity, or beside a 1x1 projection where the shape changes."""

    def __init__(self, before: int, after: int, stride: int, config: ResNet18) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.first_norm = config.over(after)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.second_norm = config.over(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), config.over(after))

    def forward(self, inputs: Tensor) -> Tensor:
        inner = functional.relu(self.first_norm(self.first(inputs)))
        return functional.relu(self.second_norm(self.second(inner)) + self.shortcut(inputs))


@dataclass(frozen=True)
class Point:
    """A point w of the plane, for quadratics 1/2 (w-c)'A(w-c) given as rows (a11, a12, a22, c1, c2)."""

    start: tuple[float, ...] = (-10.0, -10.0)

    def __post_init__(self) -> None:
        if len(self.start) != 2:
            raise InputError(
                f"start = {self.start} has {len(self.start)} numbers: a point of the plane has 2"
            )

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        if shape != (5,):
            raise InputError(
                f"point wants rows (a11, a12, a22, c1, c2), but examples have shape {shape}: use such rows"
            )
        return _Quadratic(self.start)


class _Quadratic(nn.Module):
    """Its output is the loss itself, one value per row: train it with loss "value"."""

    def __init__(self, start: tuple[float, ...]) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.tensor(start, dtype=torch.float32))

    def forward(self, rows: Tensor) -> Tensor:
        a11, a12, a22 = rows[:, 0], rows[:, 1], rows[:, 2]
        away = self.point - rows[:, 3:5]
        x, y = away[:, 0], away[:, 1]
        return 0.5 * (a11 * x * x + 2 * a12 * x * y + a22 * y * y)


def _image(name: str, shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """The shape as channels, height, width."""
    if len(shape) != 3:
        raise InputError(
            f"{name} wants images (channels, height, width), but examples have shape {shape}: "
            f"choose linear or mlp"
        )
    channels, height, width = shape
    if min(height, width) < smallest:
        raise InputError(
            f"{name} wants images of {smallest}x{smallest} or more, not {height}x{width}: choose mlp"
        )
    return channels, height, width


MODELS: dict[str, type[Model]] = {
    "linear": Linear,
    "mlp": Mlp,
    "mnist-cnn": MnistCnn,
    "cifar-cnn": CifarCnn,
    "fedasync-cnn": FedAsyncCnn,
    "resnet18": ResNet18,
    "point": Point,
    "bert": Bert,
    "distilbert": DistilBert,
    "causal-lm": CausalLm,
}
