"""The few acts on files that the store makes: each one durable, and each failure with a name."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from afield.core.errors import InputError

Piece = Any  # whatever has the buffer protocol: bytes, a memoryview, a numpy array of bytes
DRAFT = ".draft"  # ends the name of what is being written
AT_ONCE = 512  # pieces in one call of writev: the system allows 1,024
PAGE = mmap.PAGESIZE
STEP = 8 * 2**20  # bytes in one call: the disk writes them while the next ones are summed up and copied

# Called before every act with its name, the file, and what is about to be written or the paths. Tests stop here.
before: Callable[[str, int, Sequence[Piece]], None] | None = None

REMEDIES = {
    errno.ENOSPC: "the disk is full: make room",
    errno.EDQUOT: "the quota is used up: make room",
    errno.EFBIG: "the file-size limit is reached: raise it (ulimit -f)",
    errno.EROFS: "the file system is read-only: choose a folder that can be written",
    errno.EACCES: "not allowed: choose a folder that can be written",
    errno.EPERM: "not allowed: choose a folder that can be written",
    errno.ENOTDIR: "a file stands where a folder should be: choose another folder",
    errno.EEXIST: "a file stands where a folder should be: choose another folder",
    errno.ENOENT: "it does not exist: choose an existing folder",
    errno.EIO: "the disk reports an error: check it, and use another",
}


@contextmanager
def named(path: Path, act: str) -> Iterator[None]:
    """Turn what the system reports into an InputError that says which file, why, and what to do."""
    try:
        yield
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "check the folder and the disk")
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise InputError(
            f"cannot {act} {path} ({reason}): {remedy}; what was stored before is unharmed"
        ) from (error)


def reached(act: str, fd: int = -1, pieces: Sequence[Piece] = ()) -> None:
    if before is not None:
        before(act, fd, pieces)


def make(folder: Path) -> None:
    """The folder, and its name on the disk."""
    with named(folder, "make the folder"):
        if not folder.is_dir():
            folder.mkdir(parents=True)
            sync_folder(folder.parent)


def write(fd: int, pieces: Sequence[Piece]) -> int:
    """Write all of the pieces at the file's position; gives how many bytes they are."""
    reached("write", fd, pieces)
    left = [
        view[k : k + STEP]
        for view in (memoryview(piece).cast("B") for piece in pieces)
        for k in range(0, view.nbytes, STEP)
    ]
    total = sum(view.nbytes for view in left)
    first = 0
    while first < len(left):
        last, size = first + 1, left[first].nbytes
        while last < min(len(left), first + AT_ONCE) and size + left[last].nbytes <= STEP:
            size += left[last].nbytes
            last += 1
        done = os.writev(fd, left[first:last])
        while first < len(left) and done >= left[first].nbytes:
            done -= left[first].nbytes
            first += 1
        if done:  # a signal ended the call in the middle of a piece
            left[first] = left[first][done:]
        if size > STEP // 2:
            _start(fd)
    return total


def _start(fd: int) -> None:
    """Let the disk begin with what was written. A hint: what it makes of it shows at the next sync."""
    if _sync_file_range is not None:
        _sync_file_range(fd, 0, 0, 2)  # SYNC_FILE_RANGE_WRITE


_sync_file_range = getattr(
    ctypes.CDLL(None), "sync_file_range", None
)  # Linux has it, Python has no name for it
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def sync(fd: int) -> None:
    reached("fsync", fd)
    os.fdatasync(fd)


def sync_folder(folder: Path) -> None:
    """Make names in the folder durable."""
    reached("fsync-folder", -1, (folder,))
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(old: Path, new: Path) -> None:
    """Give a finished file its name, durably."""
    reached("rename", -1, (old, new))
    os.replace(old, new)
    sync_folder(new.parent)


def whole(path: Path, *pieces: bytes | memoryview, mode: int = 0o666, mark: str = "") -> None:
    """Write a file that is there as a whole, and on the disk, or not at all: what was there stays until then.

    `mark` tells its draft from those of others who may write the same file at that moment.
    """
    draft = path.with_name(f".{path.name}{mark}{DRAFT}")
    try:
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def remove(path: Path) -> None:
    reached("remove", -1, (path,))
    path.unlink(missing_ok=True)


def forget(fd: int, size: int | None = None) -> None:
    """Drop the file from the page cache: what is read next comes from the disk.

    With its size, all but the page that it ends in, which who appends needs.
    """
    length = 0 if size is None else size // PAGE * PAGE
    if size is None or length:  # 0 means all of it
        os.posix_fadvise(fd, 0, length, os.POSIX_FADV_DONTNEED)


def read(fd: int, out: Piece, offset: int) -> bool:
    """Fill `out` from there; False where the file ends before."""
    view = memoryview(out).cast("B")
    while view.nbytes:
        got = os.preadv(fd, [view], offset)
        if got == 0:
            return False
        view, offset = view[got:], offset + got
    return True
