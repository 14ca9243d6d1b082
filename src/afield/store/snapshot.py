"""Snapshots: the whole of a value in one file, by atomic rename; several generations, the newest that verifies.

Incremental for tables: the tensors of an object whose class says `steady = True` change by torch's own operations
only, which torch counts (`_version`). Those that did not change since they were written are not written again: the
new file says in which older one they lie, and that one is kept. An object that gave a `picture` of itself is told by
`settled(oldest)` that a generation was proven readable, and which is the oldest that may still be read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afield.core.errors import InputError, within
from afield.store import files
from afield.store.kinds import Kind
from afield.store.pack import DTYPES, DamagedError, Head, Packed, Read, Spot, built, head, pack, tensor_at

log = logging.getLogger(__name__)
ENDING = ".snapshot"
WASTE = 2  # the files that a snapshot needs may be so many times as large as what they hold of use


class Snapshots:
    """The generations of one value in a folder of which this process is the owner."""

    def __init__(self, folder: Path | str, kinds: Mapping[str, Kind], keep: int = 2) -> None:
        within("keep", keep, 1, 1000)
        self.folder, self.kinds, self.keep = Path(folder), kinds, keep
        self.steady: dict[
            int, tuple[Tensor, int, Spot]
        ] = {}  # by id: the tensor, its count then, where it lies
        self.oldest: tuple[int, dict[str, Any]] | None = None  # generation and mark of what may still be read
        files.make(self.folder)

    def path(self, generation: int) -> Path:
        return self.folder / f"{generation:010d}{ENDING}"

    def generations(self) -> list[int]:
        """Of the files that are there, oldest first."""
        names = [path.name.removesuffix(ENDING) for path in self.folder.glob(f"*{ENDING}")]
        return sorted(int(name) for name in names if name.isdecimal())

    # -- writing ----------------------------------------------------------------------------------------------

    def write(self, value: Any, mark: Mapping[str, Any]) -> int:
        """Write a new generation and prove that it can be read; then remove those that are not needed any more."""
        there = self.generations()
        generation = there[-1] + 1 if there else 1
        packed = pack(value, self.kinds, mark, generation=generation, known=self._known)
        if self._waste(packed, there):
            packed = pack(value, self.kinds, mark, generation=generation)
        path = self.path(generation)
        draft = path.with_suffix(".draft")
        try:
            with files.named(draft, "write"):
                self._write(draft, packed)
            self._prove(draft, generation)
            with files.named(path, "name"):
                files.rename(draft, path)
        except InputError:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
        self._remember(packed.tensors, packed.spots, generation)
        self.oldest = self._clean()
        for one in packed.pictured:
            if self.oldest is not None and hasattr(one, "settled"):
                one.settled(self.oldest[0])
        return generation

    def _write(self, draft: Path, packed: Packed) -> None:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            files.write(fd, packed.pieces)
            files.sync(fd)
            files.forget(fd)
        finally:
            os.close(fd)

    def _prove(self, path: Path, generation: int) -> None:
        """Read back from the disk what was written; older files were proven when they were written."""
        with self._reading(path) as (read, size):
            top = self._head(read, size, path)
            for spot in top.spots:
                if spot.source == 0:
                    tensor_at(spot, top.start, read, str(path), "cpu")
            for source in {spot.source for spot in top.spots} - {0}:
                if not self.path(source).exists():
                    raise DamagedError(
                        f"{self.path(source)} is missing, and generation {generation} needs it"
                    )

    def _known(self, tensor: Tensor) -> Spot | None:
        found = self.steady.get(id(tensor))
        if found is None or found[0] is not tensor or found[1] != tensor._version:
            return None
        return found[2]

    def _remember(self, tensors: list[Tensor], spots: list[Spot], generation: int) -> None:
        self.steady = {
            id(tensor): (tensor, tensor._version, replace(spot, source=spot.source or generation))
            for tensor, spot in zip(tensors, spots, strict=True)
            if spot.steady
        }

    def _waste(self, packed: Packed, there: list[int]) -> bool:
        """Whether an incremental file would keep too much alive that is of no use, or rests on a lost file."""
        sources = {spot.source for spot in packed.spots} - {0}
        if not sources <= set(there):
            return True
        kept = sum(self.path(source).stat().st_size for source in sources)
        return bool(sources) and kept + packed.bytes > WASTE * sum(spot.bytes for spot in packed.spots)

    def _clean(self) -> tuple[int, dict[str, Any]] | None:
        """Remove what no kept generation needs; gives the oldest that is kept, where all of those can be read."""
        there = self.generations()
        kept = there[-self.keep :]
        try:
            tops = [self._top(generation) for generation in kept]
        except InputError:
            return None  # cannot tell what it rests on: remove nothing
        needed = {*kept, *(spot.source for top in tops for spot in top.spots)}
        with files.named(self.folder, "clean"):
            for generation in there:
                if generation not in needed:
                    files.remove(self.path(generation))
            for draft in self.folder.glob("*.draft"):
                files.remove(draft)
        return kept[0], tops[0].mark

    # -- reading ----------------------------------------------------------------------------------------------

    def newest(
        self, device: str | torch.device = "cpu", check: Callable[[Mapping[str, Any]], None] | None = None
    ) -> tuple[Any, dict[str, Any], int] | None:
        """Value, mark and generation of the newest that verifies; None where there is none at all.

        `check` may refuse the mark before anything else is read.
        """
        first: InputError | None = None
        for generation in reversed(self.generations()):
            try:
                if check is not None:
                    check(self._top(generation).mark)
                found = self.read(generation, device)
            except DamagedError as error:
                log.warning("%s; trying the generation before", error)
                first = first or error
            else:
                return *found, generation
        if first is not None:
            raise InputError(f"no snapshot in {self.folder} can be read: {first}; restore one from a copy")
        return None

    def read(self, generation: int, device: str | torch.device = "cpu") -> tuple[Any, dict[str, Any]]:
        """One generation, every checksum verified."""
        path, top = self.path(generation), self._top(generation)
        tensors: list[Any] = [None] * len(top.spots)
        for source in sorted({spot.source for spot in top.spots}):
            other = self.path(source or generation)
            start = self._top(source or generation).start
            with self._reading(other) as (read, _):
                for k, spot in enumerate(top.spots):
                    if spot.source == source:
                        tensors[k] = tensor_at(spot, start, read, str(other), device)
        value = built(top.tree, tensors, self.kinds, str(path))
        self._remember(tensors, top.spots, generation)
        return value, top.mark

    def peek(self, generation: int) -> Any:
        """The value without what is in its tensors, which are empty: for what only its numbers are needed of."""
        top = self._top(generation)
        hollow = [torch.empty(0, dtype=DTYPES[spot.dtype]) for spot in top.spots]
        return built(top.tree, hollow, self.kinds, str(self.path(generation)))

    def mark(self, generation: int) -> dict[str, Any]:
        return self._top(generation).mark

    def _top(self, generation: int) -> Head:
        path = self.path(generation)
        with self._reading(path) as (read, size):
            return self._head(read, size, path)

    def _head(self, read: Read, size: int, path: Path) -> Head:
        top = head(read, str(path))
        if size != top.bytes:
            raise DamagedError(f"{path} is damaged: it has {size:,} bytes where {top.bytes:,} were written")
        return top

    @contextmanager
    def _reading(self, path: Path) -> Iterator[tuple[Read, int]]:
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise DamagedError(f"{path} is missing") from None
        except OSError as error:
            raise InputError(f"cannot open {path} ({error.strerror}): check the folder") from None
        try:
            with files.named(path, "read"):
                yield (lambda out, offset: files.read(fd, out, offset)), os.fstat(fd).st_size
        finally:
            os.close(fd)
