"""Any nesting of dataclasses, containers, numbers and tensors as bytes, and back. Nothing read here can run code.

    preamble   8 bytes magic, format (4), checksum of the rest of the head (4), length of the JSON (8)
    JSON       the tree of the value, what the caller noted, and a list of the tensors
    tensors    raw, little-endian, each at a multiple of 64 bytes, so that a file can be mapped

In the tree null, true, false, integers, finite floats and strings are themselves; an object is a dataclass, with its
name under "="; a list is anything else, with a letter first. A tensor object that occurs twice is stored once, and
one object when it is read. Equal values give equal bytes.

A class may have its own form: `picture(generation)` gives a mapping of its parts (after which a table on a file has
synced its rows), and the kind of that name is called with it. See snapshot.py for `settled`, and for `steady`.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from afield.core.errors import InputError
from afield.store.files import Piece
from afield.store.kinds import Kind

try:
    from isal.isal_zlib import crc32  # extra `serve`: the same sums 14 times as fast
except ImportError:
    from zlib import crc32

FORMAT = 1
MAGIC = b"afield\r\n"  # a transfer that "corrects" line ends breaks it at once
PREAMBLE = struct.Struct("<8sIIQ")
ALIGN = 64
ZEROS = bytes(ALIGN)
MOST = 2**40  # bytes: a length beyond is damage, whatever its checksum says
LARGE = 2**62  # integers from here on are written in hexadecimal: JSON readers differ

DTYPES: dict[str, torch.dtype] = {
    str(kind).removeprefix("torch."): kind
    for kind in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16,
        torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
NAMES = {kind: name for name, kind in DTYPES.items()}


class DamagedError(InputError):
    """These bytes are not what was written."""


@dataclass(slots=True)
class Spot:
    """Where a tensor lies: in this file (source 0), or in that of an earlier generation."""

    dtype: str
    shape: list[int]
    cpu: bool
    offset: int  # from the start of the tensors' part
    bytes: int
    checksum: int
    source: int = 0
    steady: bool = False  # its owner changes it by torch's own operations only

    def row(self) -> list[Any]:
        return [
            self.dtype,
            self.shape,
            self.cpu,
            self.offset,
            self.bytes,
            self.checksum,
            self.source,
            self.steady,
        ]


@dataclass(slots=True)
class Packed:
    """The pieces of a file, in order, and what was met on the way."""

    pieces: list[Piece]
    bytes: int
    start: int  # where the tensors' part begins
    tensors: list[Tensor]
    spots: list[Spot]
    pictured: list[Any]  # objects that gave a picture of themselves


@dataclass(slots=True)
class Head:
    """What stands before the tensors."""

    tree: Any
    mark: dict[str, Any]
    spots: list[Spot]
    start: int
    bytes: int  # of the whole


Known = Callable[[Tensor], Spot | None]  # where a steady tensor lies already, unchanged


@dataclass(slots=True)
class _Packing:
    kinds: Mapping[str, Kind]
    generation: int
    known: Known | None
    tensors: list[Tensor] = field(default_factory=list)
    spots: list[Spot] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)  # by id of the tensor, which `tensors` keeps alive
    bodies: list[Piece] = field(default_factory=list)
    length: int = 0
    pictured: list[Any] = field(default_factory=list)

    def tree(self, value: Any, path: str, steady: bool = False) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -LARGE < value < LARGE else ["i", hex(value)]
        if kind is float:
            return value if math.isfinite(value) else ["f", struct.pack("<d", value).hex()]
        if kind is tuple or kind is list:
            return ["t" if kind is tuple else "l", *[self.tree(item, path, steady) for item in value]]
        if isinstance(value, Tensor):
            return ["x", self.place(value, path, steady)]
        if isinstance(value, Mapping) and not is_dataclass(value):
            out = ["d"]
            for key, item in value.items():
                out += (self.tree(key, path), self.tree(item, f"{path}.{key}", steady))
            return out
        if kind is deque:
            return ["q", value.maxlen, *[self.tree(item, path, steady) for item in value]]
        if kind is set or kind is frozenset:
            items = [self.tree(item, path) for item in value]
            return ["s" if kind is set else "z", *sorted(items, key=json.dumps)]
        if kind is bytes:
            return ["b", b64encode(value).decode()]
        return self.object(value, path)

    def object(self, value: Any, path: str) -> Any:
        name = type(value).__name__
        if hasattr(value, "picture"):
            self.pictured.append(value)
            parts = value.picture(self.generation)
        elif is_dataclass(value) and not isinstance(value, type):
            parts = {column.name: getattr(value, column.name) for column in fields(value)}
        else:
            raise InputError(
                f"{path} is a {name}, which cannot be stored: keep state in dataclasses, containers and tensors"
            )
        known = self.kinds.get(name)
        if known is None or (isinstance(known, type) and known is not type(value)):
            raise InputError(f"{path} is a {name} that no reader knows: add it to the kinds")
        steady = getattr(type(value), "steady", False)
        return {"=": name, **{key: self.tree(part, f"{path}.{key}", steady) for key, part in parts.items()}}

    def place(self, tensor: Tensor, path: str, steady: bool) -> int:
        if (index := self.places.get(id(tensor))) is not None:
            return index
        if tensor.dtype not in NAMES or tensor.layout != torch.strided:
            raise InputError(f"{path} is a tensor of {tensor.dtype}, {tensor.layout}, which cannot be stored")
        self.places[id(tensor)] = index = len(self.tensors)
        self.tensors.append(tensor)
        spot = self.known(tensor) if steady and self.known is not None else None
        if spot is None:
            body = raw(tensor)
            offset = self.length
            spot = Spot(
                NAMES[tensor.dtype], list(tensor.shape), tensor.is_cpu, offset, body.nbytes, crc32(body)
            )
            spot.steady = steady
            pad = -body.nbytes % ALIGN
            self.bodies += (body, ZEROS[:pad])
            self.length += body.nbytes + pad
        self.spots.append(spot)
        return index


def raw(tensor: Tensor) -> Any:
    """The tensor's bytes, without a copy where it is contiguous and on the CPU."""
    assert sys.byteorder == "little"
    if tensor.is_cpu and tensor.dim() == 1 and tensor.is_contiguous():  # two calls of torch, not five
        return tensor.detach().view(torch.uint8).numpy()
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def pack(
    value: Any,
    kinds: Mapping[str, Kind],
    mark: Mapping[str, Any] | None = None,
    *,
    generation: int = 0,
    known: Known | None = None,
) -> Packed:
    """The value as pieces to be written one after the other. `mark`: what a reader may know before the value."""
    packing = _Packing(kinds, generation, known)
    tree = packing.tree(value, "state")
    rows = [spot.row() for spot in packing.spots]
    text = json.dumps(
        {"tree": tree, "mark": dict(mark or {}), "tensors": rows}, separators=(",", ":"), allow_nan=False
    ).encode()
    text += b" " * (-(PREAMBLE.size + len(text)) % ALIGN)  # the tensors' part begins aligned
    rest = struct.pack("<Q", len(text))
    checksum = crc32(text, crc32(struct.pack("<I", FORMAT) + rest))
    head = PREAMBLE.pack(MAGIC, FORMAT, checksum, len(text)) + text
    return Packed(
        pieces=[head, *packing.bodies],
        bytes=len(head) + packing.length,
        start=len(head),
        tensors=packing.tensors,
        spots=packing.spots,
        pictured=packing.pictured,
    )


Read = Callable[[Piece, int], bool]  # fill a buffer from an offset; False where the bytes end


def head(read: Read, name: str) -> Head:
    """Read and verify what stands before the tensors."""
    first = bytearray(PREAMBLE.size)
    if not read(first, 0):
        raise DamagedError(f"{name} is cut short: its first bytes are missing")
    magic, form, checksum, length = PREAMBLE.unpack(first)
    if magic != MAGIC or length > MOST:
        raise DamagedError(f"{name} is not a file of afield, or its first bytes are damaged")
    text = _filled(read, length, PREAMBLE.size, name)
    if crc32(text, crc32(first[8:12] + first[16:])) != checksum:
        raise DamagedError(f"{name} is damaged: its head does not have the checksum that was written with it")
    if form != FORMAT:
        raise InputError(
            f"{name} has format {form}, this afield reads {FORMAT}: "
            + ("update afield" if form > FORMAT else "use the afield that wrote it")
        )
    parts = json.loads(text)
    spots = [Spot(*row) for row in parts["tensors"]]
    start = PREAMBLE.size + length
    own = [spot.offset + spot.bytes for spot in spots if spot.source == 0]
    end = max(own, default=0)
    return Head(parts["tree"], parts["mark"], spots, start, start + end + -end % ALIGN)


def _filled(read: Read, length: int, offset: int, name: str) -> bytearray:
    """So many bytes from there; in steps, so that a damaged length takes no memory."""
    out = bytearray()
    while len(out) < length:
        step = bytearray(min(length - len(out), 2**24))
        if not read(step, offset + len(out)):
            raise DamagedError(f"{name} is cut short")
        out += step
    return out


def tensor_at(spot: Spot, start: int, read: Read, name: str, device: str | torch.device) -> Tensor:
    """One tensor, verified; those that were not on the CPU go to the device."""
    tensor = torch.empty(spot.shape, dtype=DTYPES[spot.dtype])
    body: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    if body.nbytes != spot.bytes or not read(body, start + spot.offset):
        raise DamagedError(f"{name} is cut short: a tensor of {spot.bytes:,} bytes is missing")
    if crc32(body) != spot.checksum:
        raise DamagedError(f"{name} is damaged: a tensor does not have the checksum that was written with it")
    return tensor if spot.cpu else tensor.to(device)


def unpack(
    buffer: Piece, kinds: Mapping[str, Kind], *, name: str = "these bytes", device: str | torch.device = "cpu"
) -> tuple[Any, dict[str, Any]]:
    """The value and the mark of what `pack` gave, from one buffer."""
    view = memoryview(buffer).cast("B")

    def read(out: Piece, offset: int) -> bool:
        into = memoryview(out).cast("B")
        got = view[offset : offset + into.nbytes]
        if got.nbytes < into.nbytes:
            return False
        into[:] = got
        return True

    return unpack_from(read, view.nbytes, kinds, name=name, device=device)


def unpack_from(
    read: Read, size: int, kinds: Mapping[str, Kind], *, name: str, device: str | torch.device = "cpu"
) -> tuple[Any, dict[str, Any]]:
    """The same, from wherever `read` reads so many bytes."""
    top = head(read, name)
    if size != top.bytes:
        raise DamagedError(f"{name} is damaged: it has {size:,} bytes where {top.bytes:,} were written")
    tensors = [tensor_at(spot, top.start, read, name, device) for spot in top.spots]
    return built(top.tree, tensors, kinds, name), top.mark


def built(tree: Any, tensors: list[Tensor], kinds: Mapping[str, Kind], name: str) -> Any:
    """The value of a tree whose checksum was right."""

    def make(node: Any) -> Any:
        if type(node) is dict:
            return _object(node, {key: make(part) for key, part in node.items() if key != "="})
        if type(node) is not list:
            return node
        letter = node[0]
        if letter == "x":
            return tensors[node[1]]
        if letter == "i":
            return int(node[1], 16)
        if letter == "f":
            return struct.unpack("<d", bytes.fromhex(node[1]))[0]
        if letter == "b":
            return b64decode(node[1])
        if letter == "d":
            return {make(node[k]): make(node[k + 1]) for k in range(1, len(node), 2)}
        if letter == "q":
            return deque(map(make, node[2:]), maxlen=node[1])
        return SEQUENCES[letter](map(make, node[1:]))

    def _object(node: dict[str, Any], parts: dict[str, Any]) -> Any:
        kind = kinds.get(node["="])
        if kind is None:
            raise InputError(
                f"{name} holds a {node['=']}, which this reader does not know: "
                "use the strategy and the afield that wrote it"
            )
        if not isinstance(kind, type):
            return kind(parts)
        expected = [column.name for column in fields(kind)]
        if sorted(expected) != sorted(parts):
            odd = ", ".join(sorted(set(expected) ^ set(parts)))
            raise InputError(
                f"{name} holds a {node['=']} with other fields ({odd}): use the afield that wrote it"
            )
        value: Any = object.__new__(kind)
        for key, part in parts.items():
            object.__setattr__(value, key, part)
        return value

    return make(tree)


SEQUENCES: dict[str, Callable[..., Any]] = {"l": list, "t": tuple, "s": set, "z": frozenset}
