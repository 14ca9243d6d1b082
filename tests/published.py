"""Tiny data sets in the layout of the published ones."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np


def pixels(count: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, *shape), dtype=np.uint8)


def write_idx(path: Path, values: np.ndarray, zipped: bool) -> None:
    raw = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    if zipped:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(raw))
    else:
        path.write_bytes(raw)


def write_mnist(folder: Path, zipped: bool = False) -> tuple[np.ndarray, np.ndarray]:
    images, labels = pixels(6, 28, 28), np.array([3, 1, 4, 1, 5, 9], dtype=np.uint8)
    for split, count in (("train", 6), ("t10k", 4)):
        write_idx(folder / f"{split}-images-idx3-ubyte", images[:count], zipped)
        write_idx(folder / f"{split}-labels-idx1-ubyte", labels[:count], zipped)
    return images, labels


def write_cifar10(folder: Path, per_batch: int = 3) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    rows = pixels(6 * per_batch, 3072)
    for k, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        mine = slice(k * per_batch, (k + 1) * per_batch)
        content = {b"data": rows[mine], b"labels": [k] * per_batch, b"batch_label": b"x"}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return rows


def write_cifar100(folder: Path, *names: str) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    rows = pixels(4, 3072)
    for name in names:
        content = {"data": rows, "fine_labels": [0, 99, 50, 7], "coarse_labels": [0, 1, 2, 3]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return rows


def write_stl10(folder: Path, count: int = 5, name: str = "unlabeled_X.bin") -> np.ndarray:
    """Images [count, 3, 96, 96] as published: each colour column by column."""
    folder.mkdir(parents=True, exist_ok=True)
    images = pixels(count, 3, 96, 96)
    (folder / name).write_bytes(images.transpose(0, 1, 3, 2).tobytes())
    return images
