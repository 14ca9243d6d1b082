"""Bytes of journals and snapshots flipped, cut out and put in: a right state or a named error, whatever was done.

10,000 cases (slow; a first look is always taken). What is right: the state after all the acts; or, since a file that
was cut cannot be told from a write that was interrupted, after the first so many of them, never fewer than the
snapshot holds. Another state fails here, an error without a name does, and so does a case that takes five seconds.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from durably import acts_of, durable, equal, live

from afield.core.errors import InputError
from afield.strategies import MRAsyncFL

# of each kind: a first look, and all of them
CASES = [250, pytest.param(4000, marks=pytest.mark.slow)]
STRATEGY = MRAsyncFL()
# where syncing costs nothing: what is tested here is reading
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Kept:
    """A folder as a crash left it, and the states that may be found in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.acts = acts_of(STRATEGY, 12)[:-1]  # the last act is an update, and was acknowledged
        door = durable(STRATEGY, folder, every=4, segment=1500, table="memory")
        door.open()
        live(door, self.acts)
        self.least = [door.snapshots.mark(generation)["acts"] for generation in door.snapshots.generations()]
        door.leave()
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.changed: set[str] = set()
        self.states = []
        with tempfile.TemporaryDirectory(dir=MEMORY) as other:
            for stop in range(len(self.acts) + 1):
                door = durable(STRATEGY, Path(other), fsync="off", table="memory")
                door.open()
                live(door, self.acts, until=stop)
                door.leave()
                self.states.append(door.server)

    def named(self, ending: str) -> list[str]:
        return sorted(name for name in self.files if name.endswith(ending))

    def opened(self, changes: dict[str, bytes]) -> str:
        """How the folder opens with these contents of files: whole, so many acts short, or with a named error."""
        for path in self.folder.iterdir():
            content = self.files.get(path.name)
            if content is None or path.name in self.changed or path.stat().st_size != len(content):
                path.unlink()
        for name, content in self.files.items():
            if name in changes or not (self.folder / name).exists():
                (self.folder / name).write_bytes(changes.get(name, content))
        self.changed = set(changes)
        door = durable(STRATEGY, self.folder, table="memory")
        try:
            door.open()
        except InputError as error:
            return "named" if str(self.folder) in str(error) else f"unnamed: {error}"
        door.leave()
        intact = not any(name.endswith(".snapshot") for name in changes)
        assert self.least[-1 if intact else 0] <= door.acts
        assert equal(door.server, self.states[door.acts])
        return "whole" if door.acts == len(self.acts) else f"{len(self.acts) - door.acts} short"


def flip(data: bytearray, at: int, draw: random.Random) -> None:
    for k in range(at, min(len(data), at + draw.choice([1, 1, 2, 8]))):
        data[k] ^= draw.randrange(1, 256)


def one_bit(data: bytearray, at: int, draw: random.Random) -> None:
    data[at] ^= 1 << draw.randrange(8)


def blank(data: bytearray, at: int, draw: random.Random) -> None:
    length = min(len(data) - at, draw.choice([4, 64, 512]))
    data[at : at + length] = bytes(length)


def cut(data: bytearray, at: int, draw: random.Random) -> None:
    del data[at : at + draw.choice([1, 8, 64, 300])]


def end(data: bytearray, at: int, draw: random.Random) -> None:
    del data[at:]


def insert(data: bytearray, at: int, draw: random.Random) -> None:
    data[at:at] = draw.randbytes(draw.choice([1, 4, 64, 200]))


def repeat(data: bytearray, at: int, draw: random.Random) -> None:
    """What was written once comes again, elsewhere."""
    other = draw.randrange(len(data))
    data[at:at] = data[other : other + draw.choice([64, 128, 832])]


EDITS: list[Callable[[bytearray, int, random.Random], None]] = [
    flip,
    one_bit,
    blank,
    cut,
    end,
    insert,
    repeat,
]


def edited(data: bytes, draw: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 3])):
        if out:
            at = draw.randrange(len(out))
            if draw.random() < 0.3:
                at -= at % 64  # where frames, heads and tensors begin
            draw.choice(EDITS)(out, at, draw)
    return bytes(out)


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Kept(Path(folder))
    logging.disable(logging.NOTSET)


def hung(_signal: int, _frame: FrameType | None) -> None:
    raise TimeoutError("this case takes longer than five seconds")


def fuzzed(kept: Kept, endings: list[str], cases: int) -> Counter[str]:
    """How so many cases end; each damages one file per ending."""
    found: Counter[str] = Counter()
    before = signal.signal(signal.SIGALRM, hung)
    try:
        for case in range(cases):
            draw = random.Random(f"{endings} {case}")
            names = [draw.choice(kept.named(ending)) for ending in endings]
            signal.setitimer(signal.ITIMER_REAL, 5.0)
            try:
                found[kept.opened({name: edited(kept.files[name], draw) for name in names})] += 1
            except BaseException as error:
                raise AssertionError(f"case {case} of {endings}: {type(error).__name__}: {error}") from error
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    print(f"{found.total()} cases of {endings}: {dict(found)}")
    assert found.total() == cases
    assert not [how for how in found if how.startswith("unnamed")]
    return found


def test_the_folder_opens_as_it_was_left(kept: Kept) -> None:
    assert kept.opened({}) == "whole"
    assert len(kept.named(".snapshot")) == 2
    assert len(kept.named(".journal")) == 4


@pytest.mark.parametrize("cases", CASES)
def test_journals(kept: Kept, cases: int) -> None:
    assert {"whole", "named", "1 short", "3 short"} <= set(fuzzed(kept, [".journal"], cases))


@pytest.mark.parametrize("cases", CASES)
def test_snapshots(kept: Kept, cases: int) -> None:
    """The generation before and its journal make up for the newest: nothing is lost at all."""
    found = fuzzed(kept, [".snapshot"], cases)
    assert set(found) <= {"whole", "named"}
    assert found["whole"] > cases / 2


@pytest.mark.parametrize("cases", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_both(kept: Kept, cases: int) -> None:
    assert {"whole", "named", "1 short"} <= set(fuzzed(kept, [".journal", ".snapshot"], cases))


def test_one_flipped_byte_never_costs_an_acknowledged_update(kept: Kept) -> None:
    """Every other byte of the newest segment: what was synced is followed by a frame that says so."""
    newest = kept.named(".journal")[-1]
    data = kept.files[newest]
    found = Counter(
        kept.opened({newest: data[:k] + bytes([data[k] ^ 1 << k % 8]) + data[k + 1 :]})
        for k in range(0, len(data), 3)
    )
    assert set(found) == {"whole", "named"}
    assert found["named"] > 300


def test_a_write_cut_at_every_byte_leaves_the_record_or_nothing(kept: Kept) -> None:
    newest = kept.named(".journal")[-1]
    data = kept.files[newest]
    found = [kept.opened({newest: data[:length]}) for length in range(len(data) - 830, len(data) + 1, 2)]
    assert list(dict.fromkeys(found)) == ["2 short", "1 short", "whole"]
    assert found.count("whole") == 33  # with its witness of 64 bytes, or without a part of it
