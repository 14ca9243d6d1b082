"""Image data sets: those published, read from `folder` or else from AFIELD_DATA, and one made on the fly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from afield.core.errors import InputError, one_of, within
from afield.core.keys import Stream, generator
from afield.scenarios.dataset import Cut, Dataset, Labelled, assemble
from afield.scenarios.files import cifar10, cifar100, idx_pair, pictures, stl10

CIFAR_MEAN, CIFAR_DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
STL10 = {"stl10": "unlabeled_X.bin", "stl10-train": "train_X.bin"}
FOLDER = "folder:"


@dataclass(frozen=True, kw_only=True)
class Images(Cut):
    """What all images share: `crop` to the centre, `normal`, and images of elsewhere as unlabelled ones.

    `normal` is "channels" (mean and deviation of each) or "mean-image" (minus the mean image of the training set,
    by 128: FedAsync's code). `unlabelled` may also be "folder:DIR", PNG and JPEG files in DIR (a path, or one in the
    data folder), resized to the size of the data before the crop.
    """

    crop: int | None = None  # the middle so many rows and columns
    normal: str = "channels"
    unlabelled_limit: int = 10_000  # at most so many inputs of another set are read

    def __post_init__(self) -> None:
        if self.crop is not None:
            within("crop", self.crop, 1, math.inf, below=True)
        one_of("normal", self.normal, ("channels", "mean-image"))
        within("unlabelled_limit", self.unlabelled_limit, 1, math.inf, below=True)
        super().__post_init__()

    def _check_unlabelled(self) -> None:
        if self.unlabelled.startswith(FOLDER) and self.unlabelled != FOLDER:
            return
        one_of("unlabelled", self.unlabelled, ("", "noise", "test", *self.others, f"{FOLDER}DIR"))

    def _dataset(
        self,
        seed: int,
        train: Labelled,
        test: Labelled,
        classes: int,
        channels: tuple[Sequence[float], Sequence[float]],
        folder: str = "",
    ) -> Dataset:
        """`channels`: the mean and the deviation of each, of values in [0, 1]."""
        shape = tuple(train[0].shape[1:])
        if self.crop is not None and self.crop > min(shape[1:]):
            size = f"{shape[1]} x {shape[2]}"
            raise InputError(f"crop = {self.crop} of images of {size} pixels; at most {min(shape[1:])}")

        def other() -> Tensor:
            if self.unlabelled.startswith(FOLDER):
                return pictures(self.unlabelled.removeprefix(FOLDER), folder, self.unlabelled_limit, shape)
            if self.unlabelled in STL10:
                return stl10(STL10[self.unlabelled], folder, self.unlabelled_limit, (shape[1], shape[2]))
            return self._other()[: self.unlabelled_limit]

        return assemble(self, seed, train, test, classes, self._normaliser(train[0], *channels), other)

    def _other(self) -> Tensor:
        """The images that `unlabelled` names, where it is one of the source's own `others`."""
        raise NotImplementedError

    def _normaliser(
        self, train: Tensor, mean: Sequence[float], deviation: Sequence[float]
    ) -> Callable[[Tensor], Tensor]:
        if self.normal == "channels":
            unit = 255
            middle, scale = (torch.tensor(part).view(1, -1, 1, 1) for part in (mean, deviation))
        else:  # of all training images, also those that a run leaves out
            unit, scale = 1, torch.tensor(128.0)
            middle = self._cropped(train.sum(dim=0, keepdim=True) / len(train))
        return lambda pixels: self._cropped(pixels).to(torch.float32).div_(unit).sub_(middle).div_(scale)

    def _cropped(self, pixels: Tensor) -> Tensor:
        if self.crop is None:
            return pixels
        top, left = ((size - self.crop) // 2 for size in pixels.shape[2:])
        return pixels[:, :, top : top + self.crop, left : left + self.crop].contiguous()


@dataclass(frozen=True)
class Digits(Cut):
    """1,797 handwritten digits of 8 x 8 pixels in [0, 1], from scikit-learn; no download.

    `test`: the share kept for testing, the same examples in every run. `image`: (1, 8, 8) instead of 64.
    """

    image: bool = False
    test: float = 0.2

    def __post_init__(self) -> None:
        within("test", self.test, 0, 1, above=True, below=True)
        super().__post_init__()

    def load(self, seed: int) -> Dataset:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        inputs = torch.from_numpy(bunch.images).to(torch.float32)
        inputs = inputs.unsqueeze(1) if self.image else inputs.flatten(1)
        targets = torch.from_numpy(bunch.target).to(torch.int64)
        # Keyed by no seed: all runs are measured on one test set.
        order = torch.randperm(len(targets), generator=generator(Stream.DATA))
        count = min(len(targets) - 1, max(1, round(self.test * len(targets))))
        test, train = order[:count].sort().values, order[count:].sort().values
        pairs = ((inputs[train], targets[train]), (inputs[test], targets[test]))
        return assemble(self, seed, *pairs, 10, lambda values: values / 16)


@dataclass(frozen=True)
class MNIST(Images):
    """70,000 handwritten digits of 28 x 28 pixels (IDX files)."""

    folder: str = ""

    def load(self, seed: int) -> Dataset:
        where = ("MNIST/raw", self.folder, "yann.lecun.com/exdb/mnist")
        train, test = (idx_pair(split, *where) for split in ("train", "t10k"))
        return self._dataset(seed, train, test, 10, ((0.1307,), (0.3081,)), self.folder)


@dataclass(frozen=True)
class FashionMNIST(Images):
    """70,000 pieces of clothing of 28 x 28 pixels (IDX files)."""

    folder: str = ""

    def load(self, seed: int) -> Dataset:
        where = ("FashionMNIST/raw", self.folder, "github.com/zalandoresearch/fashion-mnist")
        train, test = (idx_pair(split, *where) for split in ("train", "t10k"))
        return self._dataset(seed, train, test, 10, ((0.2860,), (0.3530,)), self.folder)


@dataclass(frozen=True)
class CIFAR10(Images):
    """60,000 photographs of 32 x 32 pixels in 10 classes (the published Python batches)."""

    folder: str = ""
    others: ClassVar[tuple[str, ...]] = ("cifar100-test", *STL10)  # FedEcho section 5.1

    def load(self, seed: int) -> Dataset:
        names = (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")
        *parts, test = (cifar10(name, self.folder) for name in names)
        images, labels = (torch.cat(part) for part in zip(*parts, strict=True))
        return self._dataset(seed, (images, labels), test, 10, (CIFAR_MEAN, CIFAR_DEVIATION), self.folder)

    def _other(self) -> Tensor:
        return cifar100("test", self.folder)[0]


@dataclass(frozen=True)
class CIFAR100(Images):
    """60,000 photographs of 32 x 32 pixels in 100 classes (the published Python files)."""

    folder: str = ""
    others: ClassVar[tuple[str, ...]] = ("cifar10-test", *STL10)  # FedEcho section 5.1

    def load(self, seed: int) -> Dataset:
        train, test = (cifar100(name, self.folder) for name in ("train", "test"))
        return self._dataset(seed, train, test, 100, (CIFAR_MEAN, CIFAR_DEVIATION), self.folder)

    def _other(self) -> Tensor:
        return cifar10("test_batch", self.folder)[0]


@dataclass(frozen=True)
class Synthetic(Images):
    """Tiny data made on the fly: a smooth pattern per class, and another per image, `noise` times as strong.

    The classes' patterns are symmetric, so that a flip keeps the class. `draw` chooses the images; as with published
    sets they do not depend on the run's seed. `unlabelled = "unlike"`: images of other classes.
    """

    shape: tuple[int, int, int] = (3, 32, 32)
    classes: int = 10
    train: int = 2000
    test: int = 500
    noise: float = 1.0
    draw: int = 0
    others: ClassVar[tuple[str, ...]] = ("unlike",)
    grid: ClassVar[int] = 4  # a pattern is drawn at so many points a side, and smooth between them

    def __post_init__(self) -> None:
        for size in self.shape:
            within("shape", size, 1, math.inf, below=True)
        within("classes", self.classes, 2, 256)
        for name in ("train", "test"):
            within(name, getattr(self, name), 1, math.inf, below=True)
        within("noise", self.noise, 0, math.inf, below=True)
        within("draw", self.draw, 0, 2**63, below=True)
        super().__post_init__()

    def load(self, seed: int) -> Dataset:
        patterns = self._patterns(0)
        train, test = self._images(patterns, self.train, 1), self._images(patterns, self.test, 2)
        channels = self.shape[0]
        return self._dataset(seed, train, test, self.classes, ((0.5,) * channels, (40 / 255,) * channels))

    def _other(self) -> Tensor:
        return self._images(self._patterns(3), self.unlabelled_limit, 4)[0]

    def _patterns(self, word: int) -> Tensor:
        drawn = self._smooth(self.classes, generator(self.draw, Stream.DATA, word))
        return _level(drawn + drawn.flip(-1))

    def _images(self, patterns: Tensor, count: int, word: int) -> Labelled:
        own = generator(self.draw, Stream.DATA, word)
        labels = torch.arange(count)[torch.randperm(count, generator=own)] % self.classes
        values = patterns[labels].add_(self._smooth(count, own), alpha=self.noise)
        pixels = values.mul_(40 / math.hypot(1, self.noise)).add_(127.5)
        return pixels.round_().clamp_(0, 255).to(torch.uint8), labels

    def _smooth(self, count: int, own: torch.Generator) -> Tensor:
        channels, height, width = self.shape
        points = torch.randn(count, channels, self.grid, self.grid, generator=own)
        return _level(functional.interpolate(points, (height, width), mode="bilinear", align_corners=True))


def _level(values: Tensor) -> Tensor:
    """Scaled to mean square 1, each."""
    return values / values.square().mean(dim=(1, 2, 3), keepdim=True).sqrt().clamp_(min=1e-6)
