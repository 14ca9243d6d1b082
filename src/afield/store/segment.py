"""One segment of a journal, read from its front: frames of 64 bytes, each before its record (see journal.py)."""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from afield.core.errors import InputError
from afield.store import files
from afield.store.kinds import Kind
from afield.store.pack import DamagedError, Read, built, head, unpack_from

FRAME = struct.Struct("<8sQQQI")  # salt, number, synced, bytes that follow, checksum of all these
ROOM = 64  # of a frame: what follows stays aligned


@dataclass(frozen=True, slots=True)
class Frame:
    number: int
    synced: int
    bytes: int


def framed(salt: bytes, number: int, synced: int, size: int) -> bytes:
    frame = FRAME.pack(salt, number, synced, size, 0)[:-4]
    return (frame + struct.pack("<I", zlib.crc32(frame))).ljust(ROOM, b"\0")


class Segment:
    """One file, read from the front."""

    def __init__(self, path: Path, first: int) -> None:
        self.path = path
        with files.named(path, "open"):
            self.fd = os.open(path, os.O_RDONLY)
        try:
            self.size = os.fstat(self.fd).st_size
            top = head(self._from(0), str(path))
            about = built(top.tree, [], {}, str(path))
            if about["first"] != first:
                raise InputError(
                    f"{path} begins with record {about['first']}: give it back the name that it had"
                )
        except BaseException:
            os.close(self.fd)
            raise
        self.offset, self.salt = top.bytes, bytes.fromhex(about["salt"])

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def _from(self, start: int) -> Read:
        return lambda out, offset: files.read(self.fd, out, start + offset)

    def more(self, number: int) -> bool:
        """Whether anything follows; what only says that records up to this one were synced is passed over."""
        while self._frame_at(self.offset) == Frame(number, number, 0):
            self.offset += ROOM
        return self.offset < self.size

    def next(self, number: int, kinds: Mapping[str, Kind], device: str | torch.device) -> Any:
        """The record at the offset, which moves on only if it is right and has this number."""
        name = f"record {number} of {self.path}"
        found = self._frame_at(self.offset)
        if found is None or found.number != number:
            raise DamagedError(f"{name} is damaged or cut short at its beginning")
        start = self.offset + ROOM
        if start + found.bytes > self.size:
            raise DamagedError(f"{name} is cut short")
        with files.named(self.path, "read"):
            value, mark = unpack_from(self._from(start), found.bytes, kinds, name=name, device=device)
        if mark != {"number": number}:
            raise DamagedError(f"{name} holds another record")
        self.offset = start + found.bytes
        return value

    def _frame_at(self, offset: int) -> Frame | None:
        room = bytearray(ROOM)
        whole = files.read(self.fd, room, offset) and not any(room[FRAME.size :])
        return self._frame(room) if whole else None

    def _frame(self, room: bytes | bytearray) -> Frame | None:
        salt, number, synced, length, checksum = FRAME.unpack(room[: FRAME.size])
        if salt != self.salt or zlib.crc32(room[: FRAME.size - 4]) != checksum:
            return None
        return Frame(number, synced, length)

    def frames(self, offset: int) -> Iterator[Frame]:
        """Every frame from there on, wherever it stands."""
        if offset >= self.size:
            return
        with mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ) as all_of_it:
            while (offset := all_of_it.find(self.salt, offset)) >= 0:
                room = all_of_it[offset : offset + FRAME.size]
                if len(room) == FRAME.size and (found := self._frame(room)) is not None:
                    yield found
                offset += 1
