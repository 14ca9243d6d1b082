"""Tables whose rows are in a file: the bits of those in memory, what a snapshot finds again, and what is refused."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from afield.core.errors import InputError
from afield.core.places import choose, free_memory, place, size
from afield.core.rows import HEADER, RowFile
from afield.core.server import Server
from afield.core.table import BLOCK, PRECISIONS, ClientTable
from afield.core.table import CHUNK as PIECE
from afield.core.types import ServerState, Task, Update
from afield.strategies import ACE, MRAsyncFL

CHUNK = PIECE * torch.get_num_threads()
every_precision = pytest.mark.parametrize("precision", PRECISIONS)


def vector(size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def put(
    table: ClientTable, client: int, value: Tensor, minus: Tensor | None = None, count: int = 0
) -> Tensor:
    """Exchange a row; the old and the new one as they were handed out, one after the other."""
    seen = torch.full((2, value.numel()), torch.nan, dtype=value.dtype)
    for part, before, write in table.exchange(Task(0, client, count, 0, 0.0), 3, value, minus):
        seen[0, part] = before
        seen[1, part] = write()
    return seen


def filed(like: Tensor, clients: int, precision: str, folder: Path | None, **more: Any) -> ClientTable:
    table = ClientTable.like(like, clients, precision, **more)
    place(table, "disk", folder)
    return table


# -- the same bits ------------------------------------------------------------------------------------------------


@every_precision
@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK + 1, CHUNK, 2 * CHUNK + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_file_hands_out_what_memory_does(
    size: int, precision: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    initial = vector(size, 9, dtype)
    memory = ClientTable.like(initial, 4, precision, initial=initial.clone())
    disk = filed(initial, 4, precision, tmp_path, initial=initial.clone())
    for count in range(9):
        client = count * count % 4
        value, minus = vector(size, count, dtype), None if count % 2 else vector(size, 50, dtype)
        expected, found = put(memory, client, value, minus, count), put(disk, client, value, minus, count)
        assert torch.equal(found, expected)
        for other in range(4):
            assert disk.has(other) == memory.has(other)
            for kind in (torch.float32, torch.float64):
                assert torch.equal(disk.row(other, kind), memory.row(other, kind))
    assert not disk.rows and not disk.scales


@every_precision
def test_another_row_may_be_read_in_the_middle_of_an_exchange(precision: str, tmp_path: Path) -> None:
    """As ACED does with the row that expires: chunk by chunk, while its client's row is being replaced."""
    size = 2 * CHUNK + 7
    table = filed(vector(size), 3, precision, tmp_path)
    first, second = put(table, 0, vector(size, 1))[1], put(table, 1, vector(size, 2))[1]
    for part, old, write in table.exchange(Task(0, 0, 1, 0, 0.0), 3, vector(size, 3)):
        assert torch.equal(table.stored(1, part, torch.float32), second[part])
        assert torch.equal(old, first[part])
        new = write()
        assert torch.equal(old, first[part])  # it lies elsewhere
        assert torch.equal(table.stored(1, part, torch.float32), second[part])
        assert not torch.equal(new, old)
    assert not table.stored(2, slice(0, 5), torch.float32).any()


@every_precision
def test_rows_move_from_memory_to_a_file_and_a_copy_has_its_own(precision: str, tmp_path: Path) -> None:
    table = ClientTable.like(vector(1500), 5, precision)
    kept = {client: put(table, client, vector(1500, client))[1] for client in (4, 0, 2)}
    place(table, "disk", tmp_path)
    copied = copy.deepcopy(table)
    put(table, 2, torch.zeros(1500))
    for client, row in kept.items():
        assert torch.equal(copied.row(client), row)
        assert torch.equal(table.row(client), torch.zeros(1500) if client == 2 else row)
    assert [path.name for path in tmp_path.iterdir()] == [".rows"]  # the copy's file has no name


def test_arrivals_reuse_the_slot_that_nothing_needs(tmp_path: Path) -> None:
    table = filed(vector(100), 3, "int8", tmp_path)
    for count in range(50):
        put(table, count % 3, vector(100, count), count=count)
    assert table.file is not None and table.file.at is not None
    assert table.file.at.count == 4  # the three rows, and one to write to
    assert os.path.getsize(table.file.at.path) == HEADER + 4 * table.length
    assert table.in_file == 3 * table.length


# -- snapshots ----------------------------------------------------------------------------------------------------

steps = st.lists(st.one_of(st.integers(0, 4), st.sampled_from(["snapshot", "crash"])), max_size=60)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(steps, st.sampled_from(PRECISIONS), st.integers(1, 3))
def test_every_snapshot_that_is_kept_finds_its_rows(actions: list[Any], precision: str, keep: int) -> None:
    """Whatever was written since, and however often the process died."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = filed(vector(70), 5, precision, folder)
        rows: dict[int, Tensor] = {}  # what the table should say
        kept: dict[int, tuple[ClientTable, dict[int, Tensor]]] = {}
        for count, action in enumerate(actions):
            if action == "snapshot":
                generation = max(kept, default=0) + 1
                assert table.file is not None
                kept[generation] = (picture_of(table, generation), dict(rows))
                for old in sorted(kept)[:-keep]:
                    del kept[old]
                table.file.settled(min(kept))
            elif action == "crash":
                if kept:
                    picture, rows = kept[max(kept)]
                    rows = dict(rows)
                    table = copied(picture)
                    place(table, "disk", folder, max(kept))
                    # what the older ones named may be written over now: they are not fallen back to as long as
                    # the newest can be read, and a row that is another one does not have its checksum
                    kept = {max(kept): kept[max(kept)]}
                else:
                    rows, table = {}, filed(vector(70), 5, precision, folder)
            else:
                rows[action] = put(table, action, vector(70, count), count=count)[1]
            for generation, (picture, then) in kept.items():
                opened = copied(picture)
                place(opened, "disk", folder, generation)
                for client, row in then.items():
                    assert torch.equal(opened.row(client), row)
        for client in range(5):
            assert torch.equal(table.row(client), rows.get(client, torch.zeros(70)))


def picture_of(table: ClientTable, generation: int) -> ClientTable:
    assert table.file is not None
    parts = copy.deepcopy(table.file.picture(generation))
    made = ClientTable.like(torch.empty(table.width), table.clients, table.precision)
    made.file = RowFile(parts["name"], parts["length"], parts["slots"], parts["sums"])
    return made


def copied(picture: ClientTable) -> ClientTable:
    """A picture to go on from."""
    made = copy.copy(picture)
    assert picture.file is not None
    made.rows, made.scales = {}, {}
    made.file = RowFile(
        picture.file.name, picture.file.length, dict(picture.file.slots), dict(picture.file.sums)
    )
    return made


def test_a_file_without_snapshots_of_late_does_not_grow_for_ever(tmp_path: Path) -> None:
    """Between two snapshots a client's row takes one slot more, whatever the number of its arrivals."""
    table = filed(vector(100), 4, "float32", tmp_path)
    assert table.file is not None
    for count in range(200):
        put(table, count % 4, vector(100, count), count=count)
        if count % 20 == 19:
            table.file.picture(count)
            table.file.settled(count)
    assert table.file.at is not None
    assert table.file.at.count <= 4 + 4 + 1


# -- what is refused ----------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[HEADER + 10] ^= 4
    path.write_bytes(data)


def another(path: Path) -> None:
    path.unlink()
    holder(path.parent, 1500)


def nothing(path: Path) -> None:
    path.write_bytes(b"")


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, r"table\.rows: No such file or directory; put the run's own file back"),
    "cut": (cut, r"table\.rows has 1 rows, the snapshot names 2: put the run's own file back"),
    "empty": (nothing, r"table\.rows is not a file of rows of 4032 bytes: put the run's own file back"),
    "another model": (another, r"table\.rows is not a file of rows of 4032 bytes"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), r"table\.rows: Is a directory; put"),
}


def holder(folder: Path, size: int = 1000) -> Any:
    """A server with two rows on disk."""
    server = Server(MRAsyncFL(), torch.zeros(size), 2)
    server.keep_tables("disk", folder)
    for client in (0, 1):
        assert not server.submit(Update(server.checkout(client, 0.0), vector(size, client), None, 1)).refused
    return server


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_is_not_the_one_is_refused(fault: str, tmp_path: Path) -> None:
    server = holder(tmp_path)
    picture = picture_of(server.state.table, 1)
    server.state.table.file.close()
    spoil, message = FAULTS[fault]
    spoil(tmp_path / "table.rows")
    with pytest.raises(InputError, match=message):
        place(picture, "disk", tmp_path, 1)


def test_a_damaged_row_is_refused_before_anything_changes(tmp_path: Path) -> None:
    server = holder(tmp_path)
    before = server.model()
    flip(tmp_path / "table.rows")
    damaged = next(client for client, slot in server.state.table.file.slots.items() if slot == 0)
    task = server.checkout(damaged, 0.0)
    with pytest.raises(
        InputError, match=rf"row of client {damaged} \(slot 0\) is damaged, its checksum differs"
    ):
        server.submit(Update(task, vector(1000, 7), None, 1))
    assert torch.equal(server.model(), before)
    assert server.submit(Update(server.checkout(1 - damaged, 0.0), vector(1000, 8), None, 1)).refused == ""


def test_a_picture_without_its_folder_is_refused(tmp_path: Path) -> None:
    server = holder(tmp_path)
    picture = picture_of(server.state.table, 1)
    with pytest.raises(InputError, match=r"the rows of table\.rows are in a file that is not open"):
        picture.row(0)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file in its place")
    with pytest.raises(
        InputError, match=r"store/table\.rows: (File exists|Not a directory); choose a folder"
    ):
        holder(tmp_path / "store")


FULL = """
import resource, sys, torch
from pathlib import Path
from afield.core.errors import InputError
from afield.core.server import Server
from afield.core.types import Update
from afield.strategies import ACE
server = Server(ACE(warmup="zeros"), torch.zeros(100_000), 20)
server.keep_tables("disk", Path(sys.argv[1]))
def arrive(client):
    task = server.checkout(client, 0.0)
    try:
        server.submit(Update(task, torch.full((100_000,), client + 1.0), None, 1))
    finally:
        server.cancel(task) if task.number in server.leases else None
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2_100_000, hard))
heard = 0
try:
    while True:
        before = server.model()
        arrive(heard)
        heard += 1
except InputError as error:
    print(heard, error)
assert torch.equal(server.model(), before) and not server.state.table.has(heard)
assert torch.equal(server.state.total, torch.stack([server.state.table.row(c) for c in range(20)]).double().sum(0))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
for client in range(20):
    arrive(client)
print(sum(map(server.state.table.has, range(20))))
"""


def test_a_full_disk_is_found_before_anything_changes(tmp_path: Path) -> None:
    """A limit on file sizes stands in for it; once there is room again, the server goes on."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True, env=paths()
    )
    first, last = done.stdout.splitlines()
    assert first.startswith("5 ")  # rows of 400,000 bytes
    assert "table.rows: the disk is full, or a limit on file sizes is reached; free some space" in first
    assert last == "20"


def paths() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


# -- memory or disk -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_what_torch_keeps_of_a_gpu_is_free() -> None:
    device = torch.device("cuda")
    torch.cuda.init()
    before = free_memory(device)
    held = torch.empty(2**30, dtype=torch.uint8, device=device)
    assert before - free_memory(device) == pytest.approx(2**30, rel=0.1)
    del held
    assert free_memory(device) == pytest.approx(before, abs=2**26)


def test_the_choice_goes_by_what_all_rows_take(caplog: pytest.LogCaptureFixture) -> None:
    free = free_memory(torch.device("cpu"))
    assert 2**26 < free < 2**50
    row = torch.zeros(1000)
    fits, beyond = (ServerState(params=row) for _ in range(2))
    small = Server(ACE(precision="int8"), row, 10).state
    huge = Server(ACE(), row, 1 + free // 4000).state
    with caplog.at_level(logging.WARNING, "afield"):
        assert choose("auto", fits) == choose("memory", beyond) == "memory"  # they have no tables
        assert choose("auto", small) == "memory"
        assert not caplog.messages
        assert choose("auto", huge) == "disk"
        assert choose("memory", huge) == "memory"
        assert choose("disk", small) == "disk"
    (message,) = caplog.messages
    assert message.startswith("table = disk: ") and "rows of 1000 elements (float32) take" in message
    with pytest.raises(InputError, match="table = 'disc' is not known; did you mean 'disk'"):
        choose("disc", small)


@pytest.mark.parametrize(
    ("precision", "wide", "bytes"), [("float32", 1000, 4032), ("bfloat16", 1000, 2048), ("int8", 3000, 3072)]
)
def test_a_table_takes_what_it_says(precision: str, wide: int, bytes: int, tmp_path: Path) -> None:
    table = filed(vector(wide), 7, precision, tmp_path)
    assert size(table) == 7 * bytes
    for client in range(7):
        put(table, client, vector(wide, client))
    assert table.file is not None and table.file.at is not None
    assert os.path.getsize(table.file.at.path) == HEADER + size(table)


def test_a_disk_that_is_too_small_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "afield"):
        server = Server(ACE(), torch.zeros(10**6), 10**9)
        assert server.keep_tables("auto", tmp_path) == "disk"
    assert ["take" in message for message in caplog.messages] == [True, True]
    assert "GiB free, the rows of all 1000000000 clients take" in caplog.messages[1]
    assert not list(tmp_path.iterdir())  # nothing is written before a row is


# -- memory that a table on disk takes ----------------------------------------------------------------------------

RESIDENT = """
import resource, sys, torch
from pathlib import Path
from afield.core.server import Server
from afield.core.types import Update
from afield.strategies import ACE
clients, width = int(sys.argv[2]), int(sys.argv[3])
server = Server(ACE(precision="int8", warmup="zeros"), torch.zeros(width), clients)
server.keep_tables("disk", Path(sys.argv[1]))
def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
def arrive(client):
    server.submit(Update(server.checkout(client, 0.0), model, None, 1))
model = torch.randn(width, generator=torch.Generator().manual_seed(0))
for client in range(5):
    arrive(client)
before = rss()
for client in range(clients):
    arrive(client)
for client in range(0, clients, 7):
    arrive(client)
print(rss() - before, server.state.table.in_file)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's account of memory")
def test_the_resident_set_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    clients, width = 1500, 500_000
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT, str(tmp_path), str(clients), str(width)],
        capture_output=True, text=True, check=True, env=paths(),
    )  # fmt: skip
    grown, in_file = map(int, done.stdout.split())
    assert in_file > 750e6
    assert grown < 16e6
