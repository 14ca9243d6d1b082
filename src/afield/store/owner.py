"""One owner: while a process works on a folder, no other may."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from datetime import datetime
from pathlib import Path
from types import TracebackType

from afield.core.errors import InputError
from afield.store.files import make, named

NAME = "owner.lock"
_held: set[int] = set()


def _let_go() -> None:
    for fd in _held:
        os.close(fd)
    _held.clear()


# A child that was forked holds its parent's lock for as long as it lives, also when the parent was killed.
os.register_at_fork(after_in_child=_let_go)


class Owner:
    """Holds a folder's lock for the length of a `with`. The system frees the lock of a process that died."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.fd = -1

    def __enter__(self) -> Owner:
        make(self.folder)
        path = self.folder / NAME
        with named(path, "open"):
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with named(path, "lock"):  # a file system may have no locks
                self._lock(fd)
        except InputError:
            os.close(fd)
            raise
        self.fd = fd
        _held.add(fd)
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": now})
        try:
            with named(path, "write"):
                os.ftruncate(fd, 0)
                os.pwrite(fd, text.encode(), 0)
        except InputError:
            self.free()
            raise
        return self

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = _who(os.pread(fd, 4096, 0))
            raise InputError(
                f"{self.folder} is in use by {who}: stop that one first, or wait for it"
            ) from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()

    def free(self) -> None:
        if self.fd in _held:
            _held.discard(self.fd)
            fcntl.flock(self.fd, fcntl.LOCK_UN)  # a child in the middle of its fork may have it open, too
            os.close(self.fd)
        self.fd = -1


def _who(text: bytes) -> str:
    try:
        found = json.loads(text)
        return f"process {found['pid']} on {found['host']} (since {found['started']})"
    except (ValueError, KeyError, TypeError):
        return "another process (which has not written its name yet)"
