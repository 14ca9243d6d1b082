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
import os
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
from afield.store.pack import MOST, DamagedError, pack
from afield.store.segment import Segment, framed

log = logging.getLogger(__name__)
LEVELS = ("update", "batch", "off")
ENDING = ".journal"
END = {"act": "end"}  # the last record of a segment that has a successor
SEGMENT = 256 * 2**20


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
            for some in self._together(updates):
                self.write_all([_sent(update) for update in some])
                if self.fsync == "update":
                    self.sync()
            self.commit()
        except InputError:
            if not self.broken:
                self.cut(place)
            raise

    def _together(self, updates: Sequence[Update]) -> Iterator[Sequence[Update]]:
        """As many as are written in one call."""
        longest = max((update.bytes for update in updates), default=0)
        most = 1 if self.fsync == "update" else max(1, files.STEP // max(1, longest))
        for start in range(0, len(updates), most):
            yield updates[start : start + most]

    def write(self, value: Any) -> int:
        """Append a record, not yet synced; gives its number. What cannot be written whole is not there at all."""
        return self.write_all([value])

    def write_all(self, values: Sequence[Any]) -> int:
        """Several records in one call of the system, all of them or none; gives the number of the last."""
        self._begin()
        before = self.place()
        number, pieces = before.number, list[files.Piece]()
        for value in values:
            number += 1
            packed = pack(value, self.kinds, {"number": number})
            pieces += (framed(self.salt, number, self.synced, packed.bytes), *packed.pieces)
        try:
            with files.named(self._path, "write"):
                self.bytes += files.write(self.fd, pieces)
        except InputError:
            self.cut(before)
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
        # nobody reads it before the next start: its pages are free for what comes next
        files.forget(self.fd, self.bytes)
        self._witness(self.number)

    def _witness(self, number: int) -> None:
        """Note that this record is on the disk. The note itself need not be: where it is lost, nothing else is."""
        try:
            self.bytes += files.write(self.fd, [framed(self.salt, number, number, 0)])
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
            with Segment(self.path(there[-1]), there[-1]) as newest, files.named(newest.path, "open"):
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
            if first != number + 1:
                if ended:
                    raise self._lost(number + 1)
                # a hole; or a crash came when the successor was made, the end not yet noted
                size = self.path(chain[k - 1]).stat().st_size
                self._tail(chain[k - 1 :], size, number + 1, "it is missing")
                break
            with Segment(self.path(first), first) as segment:
                while segment.more(number):
                    try:
                        value = segment.next(number + 1, self.kinds, device)
                    except DamagedError as error:
                        self._tail(chain[k:], segment.offset, number + 1, str(error))
                        self.number = number
                        return
                    number += 1
                    ended = value == END
                    if ended:
                        break  # what may follow is a witness that never got to the disk
                    yield number, value
        if ended and chain[-1] != number + 1:
            raise self._lost(number + 1)
        self.number = number

    def _lost(self, first: int) -> InputError:
        return InputError(
            f"{self.path(first)} is missing: the segment before it says that there is one; restore it from a copy"
        )

    def _tail(self, chain: list[int], offset: int, number: int, why: str) -> None:
        """From here on nothing is readable: cut it off, unless a later record says that this one was on the disk."""
        for k, first in enumerate(chain):
            with Segment(self.path(first), first) as segment:
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


def _sent(update: Update) -> Update:
    """What came from the client; base and correction were leased, and the server has them."""
    metrics = {name: float(value) for name, value in update.metrics.items()}
    return replace(update, base=None, correction=None, metrics=metrics)
