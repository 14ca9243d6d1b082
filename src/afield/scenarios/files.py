"""Readers of published image files: IDX, CIFAR's batches, STL-10's binary files, folders of PNG and JPEG.

All give images of unsigned bytes, [images, channels, height, width].
"""

from __future__ import annotations

import gzip
import io
import itertools
import math
import os
import pickle
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from afield.core.errors import InputError
from afield.core.keys import Stream, generator
from afield.scenarios.dataset import Labelled

REMEDY = "give its folder by --set scenario.data.folder=DIR or the environment variable AFIELD_DATA"
CIFAR_SITE = "www.cs.toronto.edu/~kriz/cifar.html"
STL10_SITE = "cs.stanford.edu/~acoates/stl10"
PICTURES = (".png", ".jpg", ".jpeg")


def root_of(folder: str) -> str:
    """The data folder, "" where none is set."""
    return folder or os.environ.get("AFIELD_DATA", "")


def find(name: str, usual: str, folder: str, site: str) -> Path:
    """The file `name` (or `name`.gz), in the usual sub-folder of the data folder or in that folder itself."""
    published = f"it is published at {site}; {REMEDY}"
    root = root_of(folder)
    if not root:
        raise InputError(f"{usual}/{name} is needed but no data folder is set; {published}")
    places = (Path(root) / usual, Path(root))
    for place, file in itertools.product(places, (name, f"{name}.gz")):
        if (place / file).is_file():
            return place / file
    looked = " and ".join(str(place) for place in places)
    raise InputError(f"{name} (or {name}.gz) is not in {looked}; {published}")


def contents(path: Path, most: int = -1) -> bytes:
    """The first `most` bytes of a file (all: -1), unzipped."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(most)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read ({error}); fetch it again") from error


def idx(path: Path, *shape: int) -> Tensor:
    """An IDX file of unsigned bytes, `shape` per example: 0, 0, 8, dimensions, big-endian sizes, values."""
    raw, dimensions = contents(path), 1 + len(shape)
    start = 4 + 4 * dimensions
    if raw[:4] != bytes((0, 0, 8, dimensions)) or len(raw) < start:
        raise InputError(f"{path} is not an IDX file of {dimensions} dimensions of bytes; fetch it again")
    count, *found = (int.from_bytes(raw[at : at + 4], "big") for at in range(4, start, 4))
    if tuple(found) != shape:
        sizes = " x ".join(map(str, found))
        raise InputError(
            f"{path} holds images of {sizes} pixels, not {shape[0]} x {shape[1]}; fetch it again"
        )
    values = count * math.prod(shape)
    if len(raw) - start != values or not values:
        raise InputError(f"{path} holds {len(raw) - start} of {values} values; fetch it again")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=start).view(count, *shape)


def labelled(images: Tensor, labels: Tensor, classes: int, source: Path) -> Labelled:
    if len(images) != len(labels):
        raise InputError(f"{source} has {len(labels)} labels for {len(images)} images; fetch both again")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise InputError(f"{source} has labels outside 0..{classes - 1}; is it another data set's file?")
    return images, labels.to(torch.int64)


def idx_pair(split: str, usual: str, folder: str, site: str) -> Labelled:
    """Images of 28 x 28 and their labels, as MNIST and its kin are published."""
    images = idx(find(f"{split}-images-idx3-ubyte", usual, folder, site), 28, 28).unsqueeze(1)
    source = find(f"{split}-labels-idx1-ubyte", usual, folder, site)
    return labelled(images, idx(source), 10, source)


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


def cifar(name: str, folder: str, usual: str, key: str, classes: int) -> Labelled:
    """One published batch: rows of 3 x 32 x 32 bytes, and a list of labels under `key`."""
    path = find(name, usual, folder, CIFAR_SITE)
    try:
        content = _ArraysOnly(io.BytesIO(contents(path)), encoding="bytes").load()
        batch = {k.decode() if isinstance(k, bytes) else k: v for k, v in content.items()}
        pixels = torch.from_numpy(batch["data"])
        if pixels.dtype != torch.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3072:
            raise ValueError(f"its data is {tuple(pixels.shape)} of {pixels.dtype}, not rows of 3072 bytes")
        labels = torch.tensor(batch[key], dtype=torch.int64)
    except InputError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{path} is not a CIFAR batch ({reason}); fetch it again") from error
    return labelled(pixels.view(-1, 3, 32, 32), labels, classes, path)


cifar10 = partial(cifar, usual="cifar-10-batches-py", key="labels", classes=10)
cifar100 = partial(cifar, usual="cifar-100-python", key="fine_labels", classes=100)


def stl10(name: str, folder: str, most: int, size: tuple[int, int]) -> Tensor:
    """The first `most` images of a binary file of STL-10, made smaller by averages over areas.

    An image is 96 x 96 bytes for each of three colours, column by column.
    """
    path = find(name, "stl10_binary", folder, STL10_SITE)
    one = 3 * 96 * 96
    raw = contents(path, most * one)
    whole = len(raw) if path.suffix == ".gz" else path.stat().st_size
    if not raw or len(raw) % one or whole % one:
        raise InputError(f"{path} holds {whole} bytes, not a multiple of {one} (3 x 96 x 96); fetch it again")
    images = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, 3, 96, 96).transpose(2, 3)
    return torch.cat(
        [_smaller(part, size) for part in torch.split(images, 1000)]
    )  # 4 bytes a value for 1,000 at a time


def _smaller(images: Tensor, size: tuple[int, int]) -> Tensor:
    return functional.interpolate(images.float(), size, mode="area").round_().to(torch.uint8)


def pictures(place: str, folder: str, most: int, shape: tuple[int, ...]) -> Tensor:
    """At most so many of the PNG and JPEG files in a folder and below it, resized to `shape` by areas.

    Their order is shuffled, always alike: names often go by class, and the first of these are used.
    """
    try:
        import numpy as np
        from PIL import Image
    except ImportError:
        raise InputError(
            "images are read by Pillow, which is not installed: pip install 'afield[images]'"
        ) from None
    root = next((p for p in (Path(root_of(folder)) / place, Path(place)) if p.is_dir()), None)
    if root is None:
        raise InputError(
            f"the folder of images {place} is neither here nor in the data folder; give its path"
        )
    files = sorted(path for path in root.rglob("*") if path.suffix.lower() in PICTURES and path.is_file())
    if not files:
        raise InputError(f"{root} holds no images ({', '.join(PICTURES)}); give a folder that does")
    channels, height, width = shape
    if channels not in (1, 3):
        raise InputError(f"images have 1 or 3 channels, the data has {channels}: use another unlabelled set")
    order = torch.randperm(len(files), generator=generator(Stream.DATA, 2))[:most].tolist()
    found = torch.empty(len(order), height, width, channels, dtype=torch.uint8)
    for row, at in enumerate(order):
        try:
            with Image.open(files[at]) as image:
                plain = image.convert("RGB" if channels == 3 else "L")
                pixels = np.asarray(plain.resize((width, height), Image.Resampling.BOX))
        except Exception as error:  # a damaged image may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise InputError(f"{files[at]} is not an image that can be read ({reason}); remove it") from error
        found[row] = torch.from_numpy(pixels.copy()).view(height, width, channels)
    return found.permute(0, 3, 1, 2).contiguous()
