"""Named arrays, as other frameworks send them, <-> the one flat vector that strategies work on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from afield.core.errors import InputError

Named = Mapping[str, NDArray[Any]]
MAGIC = np.lib.format.magic(1, 0)
STATISTICS = ("running_mean", "running_var")  # how torch names what normalisation layers gather


@dataclass(frozen=True)
class Arrays:
    """Where each array lies: parameters first, then normalisation statistics, known by their names.

    Whole numbers (num_batches_tracked) are no part of a model: they go out as they came in last.
    """

    names: tuple[str, ...]  # in the order they came in
    places: Mapping[str, tuple[int, int]]
    shapes: Mapping[str, tuple[int, ...]]
    types: Mapping[str, np.dtype[Any]]
    size: int
    parameters: int
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, arrays: Named) -> Arrays:
        floats = {name: array for name, array in arrays.items() if array.dtype.kind == "f"}
        if not floats:
            raise InputError(f"the model has {len(arrays)} arrays, none of floats: give it one to train")
        for name, array in arrays.items():
            if array.dtype.kind not in "fiub":
                raise InputError(f"array {name} is {array.dtype}: send floats, whole numbers or booleans")
        # one vector has one type: the widest of the arrays', and float32 at the least
        dtype = np.result_type(np.float32, *(array.dtype for array in floats.values()))
        if dtype.itemsize > 8:
            raise InputError(f"the arrays are {dtype}: convert them to float64 or less")
        # sorted() is stable: parameters keep their order, and so do the statistics after them
        order = sorted(floats, key=lambda name: name.endswith(STATISTICS))
        places, end, inside = {}, 0, 0
        for name in order:
            places[name] = (end, end + floats[name].size)
            end += floats[name].size
            if not name.endswith(STATISTICS):
                inside = end
        if not inside:
            raise InputError("the model has statistics but no parameters: give it one to train")
        shapes = {name: array.shape for name, array in arrays.items()}
        types = {name: array.dtype for name, array in arrays.items()}
        return cls(tuple(arrays), places, shapes, types, end, inside, dtype)

    def vector(self, arrays: Named) -> Tensor:
        """A new vector with these values."""
        if missing := [name for name in self.names if name not in arrays]:
            raise InputError(f"array {missing[0]} is missing: send the arrays that were received")
        if more := [name for name in arrays if name not in self.shapes]:
            raise InputError(f"array {more[0]} was not asked for: send the arrays that were received")
        out = np.empty(self.size, self.dtype)
        for name, (start, end) in self.places.items():
            array = arrays[name]
            if array.shape != self.shapes[name] or array.dtype.kind != "f":
                raise InputError(
                    f"array {name} is {array.dtype} of shape {array.shape}, not {self.types[name]} of "
                    f"{self.shapes[name]}: send the arrays that were received"
                )
            out[start:end] = array.reshape(-1)
        return torch.from_numpy(out)

    def arrays(self, vector: Tensor, whole: Named) -> dict[str, NDArray[Any]]:
        """The vector as named arrays (views where the types are equal); `whole` has the whole numbers."""
        flat = vector.detach().cpu().numpy()
        out = {}
        for name in self.names:
            if name in self.places:
                start, end = self.places[name]
                out[name] = flat[start:end].reshape(self.shapes[name]).astype(self.types[name], copy=False)
            else:
                out[name] = whole[name]
        return out

    def whole(self, arrays: Named) -> dict[str, NDArray[Any]]:
        """Those that are no part of the vector."""
        return {name: arrays[name] for name in self.names if name not in self.places}


def opened(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """What Array.numpy() gives, without its two copies: views of the bytes that came, not to be written to."""
    return {name: _opened(array) for name, array in record.items()}


def _opened(array: Array) -> NDArray[Any]:
    data = array.data
    if array.stype != "numpy.ndarray" or data[:8] != MAGIC:
        found: NDArray[Any] = array.numpy()
        return found
    start = 10 + int.from_bytes(data[8:10], "little")
    shape, columns_first, dtype = _read(data[:start])
    return np.frombuffer(data, dtype, offset=start).reshape(shape, order="F" if columns_first else "C")


@lru_cache(maxsize=4096)  # a header takes 60 us to read, and is the same for every model of a run
def _read(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    return np.lib.format.read_array_header_1_0(BytesIO(head[8:]))


def packed(arrays: Named) -> ArrayRecord:
    """What Array(ndarray) gives, with one copy instead of two."""
    return ArrayRecord({name: _packed(array) for name, array in arrays.items()})


def _packed(array: NDArray[Any]) -> Array:
    array = np.ascontiguousarray(array) if array.ndim else array
    data = b"".join((_head(array.shape, array.dtype), array.data))
    return Array(dtype=str(array.dtype), shape=tuple(array.shape), stype="numpy.ndarray", data=data)


@lru_cache(maxsize=4096)
def _head(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    head = BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, described)
    return head.getvalue()
