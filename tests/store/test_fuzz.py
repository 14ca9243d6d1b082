"""Bytes of journals and snapshots flipped, cut out and put in: a right state or a named error, whatever was done.

10,000 cases. What is right: the state after all the acts; or, since a file that was cut cannot be told from a write
that was interrupted, after the first so many of them that came after the newest snapshot. A flaw that leaves any other
state fails here, and one that hangs meets hypothesis' deadline.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from durably import acts_of, durable, live
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playback import same

from afield.core.errors import InputError
from afield.core.server import Server
from afield.store.live import Durable
from afield.strategies import MRAsyncFL

CASES = 5000  # of each kind
STRATEGY = MRAsyncFL(precision="int8")
# where syncing costs nothing: what is tested here is reading
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
Edit = tuple[str, float, bytes]

edits = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "end"]),
        st.floats(0, 1, exclude_max=True),
        st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=3,
)
often = settings(
    max_examples=CASES,
    deadline=timedelta(seconds=5),
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class Kept:
    """A folder as a crash left it, the states that may be found in it, and how cases ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.acts = acts_of(STRATEGY, 9)[:-1]  # the last act is an update, and was acknowledged
        door = durable(STRATEGY, folder, every=4, segment=1500).__enter__()
        live(door, self.acts)
        assert door.snapshots.oldest is not None
        self.least = door.snapshots.mark(door.snapshots.generations()[-1])["acts"]
        _left(door)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.changed = ""
        self.states = []
        with tempfile.TemporaryDirectory() as other:
            for stop in range(len(self.acts) + 1):
                door = durable(STRATEGY, Path(other), fsync="off").__enter__()
                live(door, self.acts, until=stop)
                _left(door)
                self.states.append(door.server)

    def named(self, ending: str) -> list[str]:
        return sorted(name for name in self.files if name.endswith(ending))

    def opened(self, name: str, data: bytes) -> str:
        """How the folder opens with this content of that file: whole, so many acts short, or with a named error."""
        for path in self.folder.iterdir():
            if path.name not in self.files or path.name == self.changed or path.stat().st_size != len(
                self.files[path.name]
            ):
                path.unlink()
        for other, content in self.files.items():
            if other == name or not (self.folder / other).exists():
                (self.folder / other).write_bytes(data if other == name else content)
        self.changed = name
        door = durable(STRATEGY, self.folder)
        try:
            door.__enter__()
        except InputError as error:
            assert str(self.folder) in str(error)
            return "named"
        _left(door)
        assert self.least <= door.acts
        assert _equal(door.server, self.states[door.acts])
        return "whole" if door.acts == len(self.acts) else f"{len(self.acts) - door.acts} short"


def _left(door: Durable) -> None:
    door.journal.close()
    door.owner.free()


def _equal(one: Server, two: Server) -> bool:
    return (
        same(one.state, two.state)
        and (one.counts, one.issued, list(one.leases)) == (two.counts, two.issued, list(two.leases))
        and all(torch.equal(lease.base, two.leases[number].base) for number, lease in one.leases.items())
    )


def edited(data: bytes, changes: list[Edit]) -> bytes:
    out = bytearray(data)
    for how, where, what in changes:
        position = int(where * len(out))
        if how == "flip":
            for k, byte in enumerate(what[: len(out) - position]):
                out[position + k] ^= byte
        elif how == "cut":
            del out[position : position + int.from_bytes(what[:2], "little") % 200]
        elif how == "insert":
            out[position:position] = what
        else:
            del out[position:]
    return bytes(out)


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Kept(Path(folder))
    logging.disable(logging.NOTSET)


def test_the_folder_opens_as_it_was_left(kept: Kept) -> None:
    assert kept.opened("", b"") == "whole"
    assert len(kept.named(".snapshot")) == 2
    assert len(kept.named(".journal")) > 4


def _fuzz(kept: Kept, ending: str) -> Counter[str]:
    endings: Counter[str] = Counter()

    @often
    @given(which=st.sampled_from(kept.named(ending)), changes=edits)
    def case(which: str, changes: list[Edit]) -> None:
        endings[kept.opened(which, edited(kept.files[which], changes))] += 1

    case()
    print(f"{endings.total()} cases of {ending}: {dict(endings)}")
    assert endings.total() >= CASES
    return endings


def test_journals(kept: Kept) -> None:
    endings = _fuzz(kept, ".journal")
    assert set(endings) > {"whole", "named", "1 short"}


def test_snapshots(kept: Kept) -> None:
    """The generation before and its journal make up for the newest: nothing is lost at all."""
    assert set(_fuzz(kept, ".snapshot")) == {"whole"}


def test_one_flipped_byte_never_costs_an_acknowledged_update(kept: Kept) -> None:
    """Every byte of the newest segment: what was synced is followed by a frame that says so."""
    newest = kept.named(".journal")[-1]
    data = kept.files[newest]
    found = Counter(
        kept.opened(newest, data[:k] + bytes([data[k] ^ 1 << k % 8]) + data[k + 1 :])
        for k in range(len(data))
    )
    assert set(found) == {"whole", "named"}
    assert found["named"] > 500


def test_a_write_cut_at_every_byte_leaves_the_record_or_nothing(kept: Kept) -> None:
    newest = kept.named(".journal")[-1]
    data = kept.files[newest]
    found = [kept.opened(newest, data[:length]) for length in range(len(data) - 800, len(data) + 1)]
    assert list(dict.fromkeys(found)) == ["2 short", "1 short", "whole"]
    assert found.count("whole") == 65  # with its witness, or without a part of it
