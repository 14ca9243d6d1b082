"""Rows of a ClientTable in a file: a changed row goes to a free slot, never over one that a snapshot names.

The file is a header and slots of equal length. Which slot is whose, and the checksum of what it holds, is in
`RowFile`, a part of the state: a snapshot holds it, and finds every row as it was then, whatever was written since.
store/snapshot.py calls `picture` when it writes one, and `settled` when that was proven readable.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afield.core.errors import InputError

FORMAT = 1
HEADER = 4096  # bytes before the first slot
ALIGNED = 64  # a row takes a multiple of so many bytes
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


class Room:
    """Memory for one row, used again and again: rows of a mapped file would stay resident once touched."""

    def __init__(self, length: int) -> None:
        self.memory = memoryview(bytearray(length))
        self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.client: int | None = None  # whose row is in it


class Open:
    """What a row file has in use beside its map: a descriptor, memory for three rows, and which slots are free."""

    def __init__(self, path: str, length: int, descriptor: int, count: int = 0) -> None:
        self.path, self.length, self.descriptor, self.count = path, length, descriptor, count
        self.close = weakref.finalize(self, os.close, descriptor)
        self.free: list[int] = []
        self.pins: dict[int, int] = {}  # slot -> the newest snapshot that names it
        self.rooms: dict[str, Room] = {}

    def room(self, use: str) -> Room:
        if use not in self.rooms:
            self.rooms[use] = Room(self.length)
        return self.rooms[use]

    def offset(self, slot: int) -> int:
        return HEADER + slot * self.length


@dataclass(eq=False, slots=True)
class RowFile:
    """A table's rows on disk."""

    name: str
    length: int  # bytes of a slot
    slots: dict[int, int] = field(default_factory=dict)  # client -> slot
    sums: dict[int, int] = field(default_factory=dict)  # client -> CRC-32 of its slot
    folder: Path | None = field(default=None, repr=False)  # None: a temporary file without a name
    at: Open | None = field(default=None, init=False, repr=False)

    # -- the file ---------------------------------------------------------------------------------------------

    def open(self, generation: int) -> None:
        """The file of a map that came from the snapshot of this number; refused where it cannot be that file."""
        path, remedy = self._path, "put the run's own file back, or start the run anew"
        with _told(path, remedy):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            at = Open(path, self.length, descriptor)
            size, head = os.fstat(descriptor).st_size, os.pread(descriptor, HEADER, 0)
        if head != _header(self.length):
            raise InputError(f"{path} is not a file of rows of {self.length} bytes: {remedy}")
        at.count = (size - HEADER) // self.length
        needed = max(self.slots.values(), default=-1) + 1
        if at.count < needed:
            raise InputError(f"{path} has {at.count} rows, the snapshot names {needed}: {remedy}")
        at.pins = dict.fromkeys(self.slots.values(), generation)
        self.at = at
        self._find_free()

    def close(self) -> None:
        if self.at is not None:
            self.at.close()
            self.at = None

    @property
    def _path(self) -> str:
        return str((self.folder or Path(tempfile.gettempdir())) / self.name)

    def _create(self) -> Open:
        """A new file, in place of one that no snapshot names."""
        path = self._path
        with _told(path, "choose a folder that can be written to"):
            if self.folder is None:
                with tempfile.TemporaryFile() as file:
                    descriptor = os.dup(file.fileno())
            else:
                self.folder.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            at = Open(path, self.length, descriptor)
            _all(os.pwrite, descriptor, memoryview(_header(self.length)), 0)
            if self.folder is not None:
                _sync_folder(self.folder)
        return at

    # -- rows -------------------------------------------------------------------------------------------------

    def read(self, client: int, use: str) -> Tensor | None:
        """The bytes of a row in the memory for this use, until that is used again; None where none was written."""
        slot = self.slots.get(client)
        if slot is None:
            return None
        at = self._open()
        room = at.room(use)
        if room.client != client:
            room.client = None
            with _told(at.path, "check the disk, then resume"):
                _all(os.preadv, at.descriptor, room.memory, at.offset(slot))
            if zlib.crc32(room.memory) != self.sums[client]:
                raise InputError(
                    f"{at.path}: the row of client {client} (slot {slot}) is damaged, its checksum differs: "
                    "put the run's own file back, or start the run anew"
                )
            room.client = client
        return room.tensor

    def blank(self) -> Tensor:
        """Memory for the next row that `write` takes."""
        return self._open().room("new").tensor

    def reserve(self) -> None:
        """See to a free slot: a full disk is found before anything changes."""
        at = self._open()
        if not at.free:
            with _told(at.path, "free some space, then resume; the rows written before are untouched"):
                _grow(at.descriptor, at.offset(at.count), self.length)
            at.free.append(at.count)
            at.count += 1

    def write(self, client: int) -> None:
        """What is in `blank` becomes this client's row."""
        self.reserve()
        at = self._open()
        slot, memory = at.free[-1], at.room("new").memory
        with _told(at.path, "check the disk, then resume"):
            _all(os.pwrite, at.descriptor, memory, at.offset(slot))
        at.free.pop()
        before = self.slots.get(client)
        if before is not None and before not in at.pins:
            at.free.append(before)
        self.slots[client] = slot
        self.sums[client] = zlib.crc32(memory)
        for room in at.rooms.values():
            if room.client == client:
                room.client = None

    # -- snapshots --------------------------------------------------------------------------------------------

    def picture(self, generation: int) -> dict[str, Any]:
        """What the snapshot of this number holds: the map. Every row is durable from here on."""
        if self.at is not None:
            with _told(self.at.path, "check the disk, then resume"):
                os.fsync(self.at.descriptor)
            self.at.pins.update(dict.fromkeys(self.slots.values(), generation))
        parts = {column.name: getattr(self, column.name) for column in fields(self)}
        return {**parts, "folder": None, "at": None}  # a run folder may be moved

    def settled(self, oldest: int) -> None:
        """Snapshots before this number are gone: slots that only they named are free."""
        if self.at is not None:
            self.at.pins = {slot: last for slot, last in self.at.pins.items() if last >= oldest}
            self._find_free()

    def __deepcopy__(self, memo: Any) -> RowFile:
        """A copy has a temporary file of its own."""
        copy = RowFile(self.name, self.length)
        for client in self.slots:
            row = self.read(client, "other")
            assert row is not None
            copy.blank().copy_(row)
            copy.write(client)
        return copy

    def _open(self) -> Open:
        if self.at is None:
            if self.slots:
                raise InputError(f"the rows of {self.name} are in a file that is not open: call keep_tables")
            self.at = self._create()  # at the first row: whoever goes on from a snapshot replaces this object
        return self.at

    def _find_free(self) -> None:
        at = self._open()
        taken = at.pins.keys() | self.slots.values()
        at.free = [slot for slot in reversed(range(at.count)) if slot not in taken]


def _header(length: int) -> bytes:
    told = {"afield": "rows", "format": FORMAT, "length": length}
    return json.dumps(told).encode().ljust(HEADER)


def _grow(descriptor: int, offset: int, length: int) -> None:
    """Take room on the disk, so that writing there cannot fail for want of it."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, offset, length)
    else:
        _all(os.pwrite, descriptor, memoryview(bytes(length)), offset)


def _all(act: Callable[..., int], descriptor: int, memory: memoryview, offset: int) -> None:
    """pread or pwrite the whole of it: one call moves 2 GB at the most."""
    done = 0
    while done < len(memory):
        piece = memory[done:]
        moved = act(descriptor, [piece] if act is os.preadv else piece, offset + done)
        if moved == 0:
            raise OSError(errno.EIO, "the file ends before the row does")
        done += moved


@contextmanager
def _told(path: str, remedy: str) -> Iterator[None]:
    """What the system refuses, as an error that names the file and what to do."""
    try:
        yield
    except OSError as error:
        reason = (
            "the disk is full, or a limit on file sizes is reached" if error.errno in FULL else error.strerror
        )
        raise InputError(f"{path}: {reason}; {remedy}") from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
