"""Models that are kept on the disk: those that were measured last, and those that were promoted."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from afield.core.errors import InputError
from afield.runtimes.service.wire import Wire, raw
from afield.store.files import named, whole

ENDING = ".safetensors"


class Kept:
    """`promoted` is what is meant for use: any version that was kept may become it, also an earlier one.

    Training goes on from the newest version either way: a strategy's sums belong to the models that made them.
    """

    def __init__(self, folder: Path, wire: Wire, keep: int) -> None:
        self.folder, self.wire, self.keep_last = folder, wire, keep
        folder.mkdir(parents=True, exist_ok=True)
        self._book = folder / "promoted.json"
        self.history: list[int] = json.loads(self._book.read_text()) if self._book.exists() else []

    @property
    def promoted(self) -> int | None:
        return self.history[-1] if self.history else None

    def path(self, version: int) -> Path:
        return self.folder / f"{version:012d}{ENDING}"

    def versions(self) -> list[int]:
        names = (path.name.removesuffix(ENDING) for path in self.folder.glob(f"*{ENDING}"))
        return sorted(int(name) for name in names if name.isdecimal())

    def keep(self, version: int, vector: Tensor) -> None:
        """Write a version, if it is not there; the oldest that nobody promoted go."""
        path = self.path(version)
        if not path.exists():
            with named(path, "write"):
                whole(path, self.wire.head("full", {"version": str(version)}), raw(vector.cpu()))
        spare = [one for one in self.versions() if one not in self.history]
        for old in spare[: -self.keep_last]:
            self.path(old).unlink(missing_ok=True)

    def promote(self, version: int) -> None:
        if not self.path(version).exists():
            raise InputError(f"version {version} is not kept: {self.versions()} are")
        if version != self.promoted:
            self._note([*self.history, version])

    def roll_back(self) -> int:
        """To what was promoted before."""
        if len(self.history) < 2:
            raise InputError("nothing was promoted before: promote a version instead")
        self._note(self.history[:-1])
        return self.history[-1]

    def _note(self, history: list[int]) -> None:
        with named(self._book, "write"):
            whole(self._book, json.dumps(history).encode())
        self.history = history

    def read(self, version: int) -> Tensor:
        return self.wire.read(bytearray(self.path(version).read_bytes())).vector
