"""The journal of a live server: every update, whole, on the disk before it is folded.

A segment is a head and then records; each record is a frame of 64 bytes and what pack.py makes of its value. The
frame says which record was the last known to be on the disk when this one was written, and after every sync comes a
frame that says nothing else. So damage can be told from an interrupted write: a bad record that a later frame calls
synced was acknowledged, and is refused with its number; any other was never promised to anyone, and is cut off
together with what follows it. The frame begins with eight bytes that are drawn for each segment, so that nothing a
client sends can pass for a frame.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from afield.core.errors import InputError, one_of, within
from afield.core.types import Update
from afield.store import files
from afield.store.kinds import CORE, Kind
from afield.store.pack import MOST, DamagedError, Read, built, head, pack, unpack_from

log = logging.getLogger(__name__)
LEVELS = ("update", "batch", "off")
ENDING = ".journal"
FRAME = struct.Struct("<8sQQQI")  # salt, number, synced, bytes that follow, checksum of all these
ROOM = 64  # of a frame: what follows stays aligned
END = {"act": "end"}  # the last record of a segment that has a successor
SEGMENT = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Frame:
    number: int
    synced: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Place:
    """A position in the newest segment, to cut back to."""

    number: int
    bytes: int


class Journal:
    """Appends records and reads them back; of one folder of which this process is the owner.

    `fsync`: "update" syncs every update by itself, "batch" at `commit`, "off" only where a segment ends.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        fsync: str = "batch",
        segment: int = SEGMENT,
        kinds: Mapping[str, Kind] = CORE,
    ) -> None:
        one_of("fsync", fsync, LEVELS)
        within("segment", segment, 1, MOST)
        self.folder, self.fsync, self.segment, self.kinds = Path(folder), fsync, segment, kinds
        self.number: int | None = None  # of the last record; None: not looked for yet
        self.synced = 0
        self.bytes = 0  # of the newest segment
        self.salt = b""
        self.fd = -1
        self._first, self._path = 0, self.folder
        self.broken = ""
        files.make(self.folder)

    def path(self, first: int) -> Path:
        return self.folder / f"{first:012d}{ENDING}"

    def segments(self) -> list[int]:
        """The first record of each segment, in order."""
        names = [path.name.removesuffix(ENDING) for path in self.folder.glob(f"*{ENDING}")]
        return sorted(int(name) for name in names if name.isdecimal())

    # -- writing ----------------------------------------------------------------------------------------------

    def append(self, update: Update) -> None:
        """Core's protocol: an accepted update, before it is folded. At "batch" it is safe after `commit`."""
        self._end_full()
        self.write(_sent(update))
        if self.fsync == "update":
            self.sync()

    def extend(self, updates: Sequence[Update]) -> None:
        """Several updates, all of them or none, and safe when this returns."""
        self._end_full()
        place = self.place()
        try:
            for update in updates:
                self.write(_sent(update))
                if self.fsync == "update":
                    self.sync()
            self.commit()
        except InputError:
            if not self.broken:
                self.cut(place)
            raise

    def write(self, value: Any) -> int:
        """Append a record, not yet synced; gives its number. What cannot be written whole is not there at all."""
        self._begin()
        assert self.number is not None
        number, offset = self.number + 1, self.bytes
        packed = pack(value, self.kinds, {"number": number})
        frame = _frame(self.salt, number, self.synced, packed.bytes)
        try:
            with files.named(self._path, "write"):
                self.bytes += files.write(self.fd, [frame, *packed.pieces])
        except InputError:
            self.cut(Place(self.number, offset))
            raise
        self.number = number
        return number

    def place(self) -> Place:
        self._begin()
        assert self.number is not None
        return Place(self.number, self.bytes)

    def cut(self, place: Place) -> None:
        """Take back the records after this place; they were not synced, and nobody was told of them."""
        try:
            os.ftruncate(self.fd, place.bytes)
            os.lseek(self.fd, place.bytes, os.SEEK_SET)
        except OSError as error:
            self.broken = f"{self._path} could not be cut back ({error.strerror})"
            return
        self.number, self.bytes = place.number, place.bytes
        self.synced = min(self.synced, place.number)

    def commit(self) -> None:
        """Group commit: all that was appended is on the disk when this returns (but at the level "off")."""
        if self.fsync != "off":
            self.sync()

    def sync(self) -> None:
        if self.fd < 0 or self.number is None or self.synced == self.number:
            return
        try:
            with files.named(self._path, "sync"):
                files.sync(self.fd)
        except InputError as error:
            # the system may have dropped what it could not write: a second call that succeeds proves nothing
            self.broken = str(error)
            raise
        self.synced = self.number
        self._witness(self.number)

    def _witness(self, number: int) -> None:
        """Note that this record is on the disk. The note itself need not be: where it is lost, nothing else is."""
        try:
            self.bytes += files.write(self.fd, [_frame(self.salt, number, number, 0)])
        except OSError:
            self.cut(Place(number, self.bytes))

    def rotate(self) -> int:
        """End the segment and begin the next; gives the number of the last record before it, now on the disk."""
        self._begin()
        assert self.number is not None
        if self.number + 1 == self._first:
            return self.number  # an empty segment is as good as a new one
        old, fresh = self.place(), self.number + 2
        path, salt = self.path(fresh), os.urandom(8)
        made = self._create(path, fresh, salt)
        try:
            self.write(END)
            self.sync()
        except InputError:
            os.close(made)
            with suppress(OSError):
                path.unlink(missing_ok=True)
            if not self.broken:
                self.cut(old)
            raise
        self._use(made, fresh, salt, fresh - 1)
        return fresh - 1

    def drop(self, before: int) -> None:
        """Remove the segments that hold no record from this number on."""
        there = self.segments()
        with files.named(self.folder, "clean"):
            for first, following in pairwise(there):
                if following <= before:
                    files.remove(self.path(first))
            for draft in self.folder.glob("*.begun"):
                files.remove(draft)

    def _end_full(self) -> None:
        self._begin()
        if self.bytes > self.segment:
            self.rotate()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _begin(self) -> None:
        """Go on in the newest segment, or in a first one."""
        if self.broken:
            raise InputError(f"{self.broken}; the journal takes no more until the server is started again")
        if self.fd >= 0:
            return
        if self.number is None:
            for _ in self.replay():
                pass
        assert self.number is not None
        if there := self.segments():
            with _Segment(self.path(there[-1]), there[-1]) as newest, files.named(newest.path, "open"):
                fd = os.open(newest.path, os.O_RDWR)
                os.lseek(fd, 0, os.SEEK_END)
                files.sync(fd)  # what was read may not be on the disk yet
            self._use(fd, there[-1], newest.salt, self.number)
        else:
            salt = os.urandom(8)
            self._use(self._create(self.path(1), 1, salt), 1, salt, 0)

    def _create(self, path: Path, first: int, salt: bytes) -> int:
        """A segment with nothing but its head, under its name on the disk."""
        draft = path.with_suffix(".begun")
        start = pack({"salt": salt.hex(), "first": first}, {})
        with files.named(path, "begin"):
            fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                files.write(fd, start.pieces)
                files.sync(fd)
                files.rename(draft, path)
            except OSError:
                os.close(fd)
                with suppress(OSError):
                    draft.unlink(missing_ok=True)
                raise
        return fd

    def _use(self, fd: int, first: int, salt: bytes, number: int) -> None:
        self.close()
        self.fd, self.salt, self.bytes = fd, salt, os.fstat(fd).st_size
        self._first, self._path = first, self.path(first)
        self.synced = self.number = number

    # -- reading ----------------------------------------------------------------------------------------------

    def replay(
        self, after: int | None = None, device: str | torch.device = "cpu"
    ) -> Iterator[tuple[int, Any]]:
        """The records after that mark, in order: what `rotate` gave, or None for all that are there.

        At the end an interrupted write is cut off, with a message.
        """
        chain = [first for first in self.segments() if after is None or first > after]
        if after is not None and (not chain or chain[0] != after + 1):
            raise InputError(f"{self.path(after + 1)} is missing: restore it from a copy")
        number = chain[0] - 1 if chain else 0
        ended = False
        for k, first in enumerate(chain):
            if (
                first != number + 1
            ):  # a hole; or a crash came when the successor was made, the end not yet noted
                self._tail(
                    chain[k - 1 :], self.path(chain[k - 1]).stat().st_size, number + 1, "it is missing"
                )
                break
            with _Segment(self.path(first), first) as segment:
                while segment.more(number):
                    try:
                        value = segment.next(number + 1, self.kinds, device)
                    except DamagedError as error:
                        self._tail(chain[k:], segment.offset, number + 1, str(error))
                        self.number = number
                        return
                    number += 1
                    ended = value == END
                    if not ended:
                        yield number, value
        if ended and chain[-1] != number + 1:
            raise InputError(
                f"{self.path(number + 1)} is missing: the segment before it says that there is one; "
                "restore it from a copy"
            )
        self.number = number

    def _tail(self, chain: list[int], offset: int, number: int, why: str) -> None:
        """From here on nothing is readable: cut it off, unless a later record says that this one was on the disk."""
        for k, first in enumerate(chain):
            with _Segment(self.path(first), first) as segment:
                for frame in segment.frames(offset if k == 0 else segment.offset):
                    if frame.synced >= number:
                        raise InputError(
                            f"record {number} in {self.path(chain[0])} is damaged ({why}), and records after it are "
                            "not: nothing was changed; restore the file from a copy"
                        )
        lost = self.path(chain[0]).stat().st_size - offset
        log.warning(
            "%s: record %d is incomplete (%s): cut off %d bytes that were never acknowledged",
            self.path(chain[0]), number, why, lost,
        )  # fmt: skip
        with files.named(self.path(chain[0]), "cut"):
            for first in reversed(chain[1:]):
                files.remove(self.path(first))
            fd = os.open(self.path(chain[0]), os.O_RDWR)
            try:
                files.reached("cut", fd)
                os.ftruncate(fd, offset)
                files.sync(fd)
            finally:
                os.close(fd)
            files.sync_folder(self.folder)


def _frame(salt: bytes, number: int, synced: int, size: int) -> bytes:
    frame = FRAME.pack(salt, number, synced, size, 0)[:-4]
    return (frame + struct.pack("<I", zlib.crc32(frame))).ljust(ROOM, b"\0")


def _sent(update: Update) -> Update:
    """What came from the client; base and correction were leased, and the server has them."""
    return replace(update, base=None, correction=None)


class _Segment:
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

    def __enter__(self) -> _Segment:
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
