"""The audit log: who did what."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from afield.core.errors import InputError

log = logging.getLogger(__name__)
MIB = 2**20


class Audit:
    """Who did what, one line of JSON each; the file is turned over at 64 MiB, five are kept.

    A full disk stops nothing but this: what does not fit into the buffer meanwhile is missing, as the log says.
    """

    MOST, FILES = 64 * MIB, 5

    def __init__(self, path: Path) -> None:
        self.path, self._failing = path, False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise InputError(f"{path} cannot be written ({error.strerror}): choose another folder") from error

    def _open(self) -> None:
        self._file = self.path.open("a", encoding="utf-8", buffering=MIB)
        self.path.chmod(0o600)

    def note(self, act: str, **values: Any) -> None:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = json.dumps({"when": when, "act": act, **values}, separators=(",", ":")) + "\n"
        with self._passing():
            self._file.write(line)

    def flush(self) -> None:
        with self._passing():
            self._file.flush()
            self._failing = False
            if self._file.tell() > self.MOST:
                self._turn_over()

    def _turn_over(self) -> None:
        self._file.close()
        for number in range(self.FILES - 1, 0, -1):
            older = self.path.with_suffix(f".{number}.jsonl")
            if older.exists():
                os.replace(older, self.path.with_suffix(f".{number + 1}.jsonl"))
        os.replace(self.path, self.path.with_suffix(".1.jsonl"))
        self._open()

    @contextmanager
    def _passing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._failing:
                log.error(
                    "%s cannot be written (%s): make room; acts may be missing in it",
                    self.path,
                    error.strerror,
                )
            self._failing = True

    def close(self) -> None:
        with self._passing():
            self._file.close()
