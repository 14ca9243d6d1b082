"""What there is to learn: data sets as published, and the clients' view of them.

Files are read from `folder`, else from the folder named by the environment variable AFIELD_DATA.
"""

from __future__ import annotations

import bisect
import gzip
import io
import itertools
import math
import os
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import data as torch_data

from afield.core.errors import InputError, one_of, within
from afield.core.keys import Stream, generator
from afield.core.protocols import Data
from afield.scenarios.texts import GSM8K, MRPC, MathInstruct, Newsgroups

NOISE = 2000  # Gaussian inputs of `unlabelled = "noise"`: as many as FedEcho distils from
CIFAR_MEAN, CIFAR_DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
Labelled = tuple[Tensor, Tensor]  # inputs as stored, int64 targets


@dataclass(frozen=True, eq=False)
class Dataset:
    """A loaded data set: float32 inputs (images NCHW), int64 targets."""

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    classes: int
    unlabelled: Tensor | None = None  # inputs that the server may distil from
    loss: str = "cross-entropy"  # "value": the model's output is the loss itself; "tokens": targets per token
    sources: Tensor | None = None  # what partitions deal by, where targets are no labels


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """How much of a training set the clients get, and what the server has without labels."""

    held_out: int = 0  # so many training examples go to no client: their inputs are the unlabelled set
    unlabelled: str = ""  # "", "noise" (Gaussian inputs), "test" (the test inputs) or one of `others`
    limit: int | None = None  # at most so many training examples (a keyed choice), for quick runs
    others: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        within("held_out", self.held_out, 0, math.inf, below=True)
        if self.limit is not None:
            within("limit", self.limit, 1, math.inf, below=True)
        one_of("unlabelled", self.unlabelled, ("", "noise", "test", *self.others))
        if self.held_out and self.unlabelled:
            both = f"held_out = {self.held_out} and unlabelled = {self.unlabelled!r}"
            raise InputError(f"{both} name two unlabelled sets; leave one out")

    @property
    def keyed(self) -> bool:
        """Whether the data depends on the seed (who gets which part of it always does)."""
        return bool(self.held_out or self.limit is not None or self.unlabelled == "noise")


def _assemble(
    cut: _Cut,
    seed: int,
    train: Labelled,
    test: Labelled,
    classes: int,
    normalise: Callable[[Tensor], Tensor],
    other: Callable[[], Labelled] | None = None,
) -> Dataset:
    """Cut first, normalise last: four bytes a value are spent on what is kept only."""
    inputs, targets = train
    test_inputs = normalise(test[0])
    total, unlabelled = len(targets), None
    if cut.held_out >= total:
        raise InputError(
            f"held_out = {cut.held_out} of {total} training examples; at most {total - 1} can be"
        )
    if cut.held_out or (cut.limit is not None and cut.limit < total):
        order = torch.randperm(total, generator=generator(seed, Stream.DATA))
        stop = total if cut.limit is None else min(total, cut.held_out + cut.limit)
        if cut.held_out:
            unlabelled = normalise(inputs[order[: cut.held_out]])
        kept = order[cut.held_out : stop].sort().values
        inputs, targets = inputs[kept], targets[kept]
    if cut.unlabelled == "noise":
        unlabelled = torch.randn(NOISE, *test_inputs.shape[1:], generator=generator(seed, Stream.DATA, 1))
    elif cut.unlabelled == "test":
        unlabelled = test_inputs
    elif cut.unlabelled and other is not None:
        unlabelled = normalise(other()[0])
    return Dataset(normalise(inputs), targets, test_inputs, test[1], classes, unlabelled)


def _standardise(pixels: Tensor, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    shape = (1, len(mean), 1, 1)
    scaled = pixels.to(torch.float32).div_(255)
    return scaled.sub_(torch.tensor(mean).view(shape)).div_(torch.tensor(deviation).view(shape))


def _find(name: str, usual: str, folder: str) -> Path:
    """The file `name` (or `name`.gz), in the usual sub-folder of the data folder or in that folder itself."""
    remedy = "give its folder by --set scenario.data.folder=DIR or the environment variable AFIELD_DATA"
    root = folder or os.environ.get("AFIELD_DATA", "")
    if not root:
        raise InputError(f"{usual}/{name} is needed but no data folder is set; {remedy}")
    places = (Path(root) / usual, Path(root))
    for place, file in itertools.product(places, (name, f"{name}.gz")):
        if (place / file).is_file():
            return place / file
    looked = " and ".join(str(place) for place in places)
    raise InputError(f"{name} (or {name}.gz) is not in {looked}; {remedy}")


def _bytes(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read ({error}); fetch it again") from error


def _idx(path: Path, dimensions: int) -> Tensor:
    """An IDX file of unsigned bytes: 0, 0, 8, dimensions, then big-endian sizes, then the values."""
    raw = _bytes(path)
    start = 4 + 4 * dimensions
    if raw[:4] != bytes((0, 0, 8, dimensions)) or len(raw) < start:
        raise InputError(f"{path} is not an IDX file of {dimensions} dimensions of bytes; fetch it again")
    shape = [int.from_bytes(raw[at : at + 4], "big") for at in range(4, start, 4)]
    values = math.prod(shape)
    if len(raw) - start != values or not values:
        raise InputError(f"{path} holds {len(raw) - start} of {values} values; fetch it again")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=start).view(shape)


def _labelled(images: Tensor, labels: Tensor, classes: int, source: Path) -> Labelled:
    if len(images) != len(labels):
        raise InputError(f"{source} has {len(labels)} labels for {len(images)} images; fetch both again")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise InputError(f"{source} has labels outside 0..{classes - 1}; is it another data set's file?")
    return images, labels.to(torch.int64)


def _load_idx(cut: _Cut, seed: int, usual: str, folder: str, mean: float, deviation: float) -> Dataset:
    def pair(split: str) -> Labelled:
        images = _idx(_find(f"{split}-images-idx3-ubyte", usual, folder), 3).unsqueeze(1)
        source = _find(f"{split}-labels-idx1-ubyte", usual, folder)
        return _labelled(images, _idx(source, 1), 10, source)

    normalise = partial(_standardise, mean=(mean,), deviation=(deviation,))
    return _assemble(cut, seed, pair("train"), pair("t10k"), 10, normalise)


class _ArraysOnly(pickle.Unpickler):
    """Rebuilds numpy arrays and plain values; a file that asks for anything else is refused, not run."""

    def find_class(self, module: str, name: str) -> Any:
        import numpy as np

        known: dict[str, Any] = {
            "ndarray": np.ndarray,
            "dtype": np.dtype,
            "_reconstruct": np.empty(0).__reduce__()[0],
            # How Python 3 writes bytes into protocol 2, the protocol of the published files.
            "encode": lambda text, _encoding: text.encode("latin1"),
        }
        homes = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "_codecs")  # numpy 2 moved one
        if module not in homes or name not in known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return known[name]


def _cifar(name: str, folder: str, usual: str, key: str, classes: int) -> Labelled:
    """One published batch: rows of 3 x 32 x 32 bytes, and a list of labels under `key`."""
    path = _find(name, usual, folder)
    try:
        content = _ArraysOnly(io.BytesIO(_bytes(path)), encoding="bytes").load()
        batch = {k.decode() if isinstance(k, bytes) else k: v for k, v in content.items()}
        pixels = torch.from_numpy(batch["data"]).view(-1, 3, 32, 32)
        labels = torch.tensor(batch[key], dtype=torch.int64)
    except InputError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{path} is not a CIFAR batch ({reason}); fetch it again") from error
    return _labelled(pixels, labels, classes, path)


_cifar10 = partial(_cifar, usual="cifar-10-batches-py", key="labels", classes=10)
_cifar100 = partial(_cifar, usual="cifar-100-python", key="fine_labels", classes=100)
_cifar_normalise = partial(_standardise, mean=CIFAR_MEAN, deviation=CIFAR_DEVIATION)


@dataclass(frozen=True)
class Digits(_Cut):
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
        return _assemble(self, seed, *pairs, 10, lambda values: values / 16)


@dataclass(frozen=True)
class MNIST(_Cut):
    """70,000 handwritten digits of 28 x 28 pixels (IDX files)."""

    folder: str = ""

    def load(self, seed: int) -> Dataset:
        return _load_idx(self, seed, "MNIST/raw", self.folder, 0.1307, 0.3081)


@dataclass(frozen=True)
class FashionMNIST(_Cut):
    """70,000 pieces of clothing of 28 x 28 pixels (IDX files)."""

    folder: str = ""

    def load(self, seed: int) -> Dataset:
        return _load_idx(self, seed, "FashionMNIST/raw", self.folder, 0.2860, 0.3530)


@dataclass(frozen=True)
class CIFAR10(_Cut):
    """60,000 photographs of 32 x 32 pixels in 10 classes (the published Python batches)."""

    folder: str = ""
    others: ClassVar[tuple[str, ...]] = ("cifar100-test",)  # FedEcho section 5.1

    def load(self, seed: int) -> Dataset:
        names = (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")
        *train, test = (_cifar10(name, self.folder) for name in names)
        images, labels = (torch.cat(part) for part in zip(*train, strict=True))
        other = partial(_cifar100, "test", self.folder)
        return _assemble(self, seed, (images, labels), test, 10, _cifar_normalise, other)


@dataclass(frozen=True)
class CIFAR100(_Cut):
    """60,000 photographs of 32 x 32 pixels in 100 classes (the published Python files)."""

    folder: str = ""
    others: ClassVar[tuple[str, ...]] = ("cifar10-test",)  # FedEcho section 5.1

    def load(self, seed: int) -> Dataset:
        train, test = (_cifar100(name, self.folder) for name in ("train", "test"))
        other = partial(_cifar10, "test_batch", self.folder)
        return _assemble(self, seed, train, test, 100, _cifar_normalise, other)


@dataclass(frozen=True)
class Quadratic:
    """Two clients with one quadratic bowl each, in two dimensions (FedStale section 3.1).

    An example is a row (a11, a12, a22, c1, c2): F(w) = 1/2 (w - c)^T A (w - c). The paper draws its
    bowls but gives no numbers; ours have their joint optimum at (-4/3, 2/3), the mean of the optima
    being (0, 0). More rows are more clients.
    """

    curvatures: tuple[tuple[float, ...], ...] = ((1.0, 0.0, 0.2), (0.2, 0.0, 1.0))
    optima: tuple[tuple[float, ...], ...] = ((-2.0, -1.0), (2.0, 1.0))
    keyed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.curvatures or len(self.curvatures) != len(self.optima):
            counts = f"{len(self.curvatures)} curvatures and {len(self.optima)} optima"
            raise InputError(f"{counts}; give one of each per client")
        for name, rows, width in (("curvatures", self.curvatures, 3), ("optima", self.optima, 2)):
            for number, row in enumerate(rows):
                if len(row) != width or not all(math.isfinite(value) for value in row):
                    raise InputError(f"{name}[{number}] = {row}; give {width} finite numbers")
        for number, (a11, a12, a22) in enumerate(self.curvatures):
            if a11 <= 0 or a11 * a22 <= a12 * a12:
                given = f"curvatures[{number}] = {(a11, a12, a22)}"
                raise InputError(f"{given} has no minimum; give a11 > 0 and a11 a22 > a12^2")

    def load(self, seed: int) -> Dataset:
        rows = torch.tensor([(*a, *c) for a, c in zip(self.curvatures, self.optima, strict=True)]).float()
        targets = torch.zeros(len(rows), dtype=torch.int64)
        return Dataset(rows, targets, rows.clone(), targets.clone(), classes=1, loss="value")

    def optimum(self) -> tuple[float, float]:
        """The minimiser of the clients' mean: (sum A)^-1 (sum A c), by Cramer's rule."""
        s11 = s12 = s22 = b1 = b2 = 0.0
        for (a11, a12, a22), (c1, c2) in zip(self.curvatures, self.optima, strict=True):
            s11, s12, s22 = s11 + a11, s12 + a12, s22 + a22
            b1, b2 = b1 + a11 * c1 + a12 * c2, b2 + a12 * c1 + a22 * c2
        determinant = s11 * s22 - s12 * s12
        return (s22 * b1 - s12 * b2) / determinant, (s11 * b2 - s12 * b1) / determinant


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
    "quadratic": Quadratic,
    "mrpc": MRPC,
    "newsgroups": Newsgroups,
    "gsm8k": GSM8K,
    "mathinstruct": MathInstruct,
}
