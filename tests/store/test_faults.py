"""Full disks, read-only folders, folders of others, missing files: a clear error, and the good data untouched."""

from __future__ import annotations

import os
import resource
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from durably import UPDATES, acts_of, durable, equal, first_day, left, live, trained, whole

from afield.core.errors import InputError
from afield.core.server import Server
from afield.core.types import LocalResult, Receipt
from afield.store import files
from afield.store import live as live_module
from afield.store.live import Durable
from afield.store.pack import PREAMBLE
from afield.strategies import ACE, FedAsync, FedBuff, MRAsyncFL


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "owner.lock"}


@pytest.mark.parametrize("what", ["strategy", "clients", "model", "about"])
def test_a_folder_of_another_server_is_refused_and_left_as_it_was(what: str, tmp_path: Path) -> None:
    with left(
        Durable(first_day(FedBuff(size=3)), tmp_path, about={"model": "linear", "shape": (4, 3)})
    ) as door:
        live(door, acts_of(FedBuff(size=3), 4))
    before = contents(tmp_path)
    about: dict[str, Any] = {"model": "linear", "shape": (4, 3)}
    server = first_day(FedBuff(size=3))
    if what == "strategy":
        server = first_day(ACE())
    elif what == "clients":
        server = first_day(FedBuff(size=3), clients=6)
    elif what == "model":
        server = Server(FedBuff(size=3), torch.zeros(28), 5, seed=3)
    else:
        about["model"] = "mlp"
    with (
        pytest.raises(InputError, match=r"is of a server with .*: give what it was begun with"),
        Durable(server, tmp_path, about=about),
    ):
        pass
    assert contents(tmp_path) == before
    about["model"] = "linear"
    with left(Durable(first_day(FedBuff(size=3)), tmp_path, about=about)) as again:
        assert equal(again.server, door.server)


def test_a_journal_without_its_snapshot_is_refused(tmp_path: Path) -> None:
    with left(durable(FedAsync(), tmp_path)) as door:
        live(door, acts_of(FedAsync(), 4))
        paths = [door.snapshots.path(generation) for generation in door.snapshots.generations()]
    for path in paths:
        path.unlink()
    with pytest.raises(InputError, match="a journal but no snapshot"):
        durable(FedAsync(), tmp_path).open()


def test_missing_segments_are_refused(tmp_path: Path) -> None:
    strategy = FedAsync()
    with left(durable(strategy, tmp_path, segment=1500)) as door:
        live(door, acts_of(strategy, 12))
        segments = door.journal.segments()
    assert len(segments) >= 4
    for k in (0, 1, len(segments) - 1):  # the first, one in the middle, the newest
        path = door.journal.path(segments[k])
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(InputError, match="missing"):
            durable(strategy, tmp_path).open()
        path.write_bytes(data)
    with left(durable(strategy, tmp_path)) as again:
        assert equal(again.server, door.server)


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """As `ulimit -f`: no file may grow beyond; stands in for a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", range(700, 4200, 250))
def test_a_full_disk_is_named_and_nothing_is_lost(size: int, tmp_path: Path) -> None:
    strategy = ACE(lr=0.5)
    acts = acts_of(strategy, UPDATES)
    server, receipts = whole(strategy, tmp_path / "whole")
    seen: list[Receipt] = []
    folder = tmp_path / "full"
    with left(durable(strategy, folder, every=5)) as door:
        with file_limit(size), pytest.raises(InputError, match="file-size limit is reached: raise it"):
            live(door, acts, seen.append)
        live(door, acts, seen.append, until=len(acts) - 6)  # room was made: the same process goes on
    with left(durable(strategy, folder)) as door:
        live(door, acts, seen.append)
        assert equal(door.server, server)
    assert seen == receipts


def test_a_full_disk_takes_back_a_whole_batch(tmp_path: Path) -> None:
    with left(durable(FedAsync(), tmp_path, fsync="batch")) as door:
        tasks = [door.checkout(client, 0.0) for client in range(5)]
        updates = [LocalResult(trained(door.server, t), 3, 1, 0.1).answer(t, 1.0) for t in tasks]
        before = door.journal.place()
        with file_limit(before.bytes + 1500), pytest.raises(InputError, match="limit"):
            door.submit_all(updates)
        assert door.journal.place() == before
        assert door.journal.path(1).stat().st_size == before.bytes
        assert door.server.version == 0
        assert [r.refused for r in door.submit_all(updates)] == [""] * 5


def test_a_snapshot_that_cannot_be_written_does_not_cost_the_receipt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = MRAsyncFL()
    acts = acts_of(strategy, 6)
    with left(durable(strategy, tmp_path, every=5, segment=10**6)) as door:
        live(door, acts[:-5])
        assert door.snapshots.generations() == [1]
        generations = door.snapshots.generations()
        (tmp_path / "0000000002.draft").mkdir()  # nothing can be written under that name
        live(door, acts)
        assert door.acts == len(acts)
        assert door.snapshots.generations() == generations
    assert "the journal grows on" in caplog.text
    (tmp_path / "0000000002.draft").rmdir()
    with left(durable(strategy, tmp_path)) as again:
        assert equal(again.server, door.server)


def test_a_fold_that_was_interrupted_stops_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = FedBuff(size=3)
    acts = acts_of(strategy, 12)
    server, _ = whole(strategy, tmp_path / "whole", 12)
    folder = tmp_path / "broken"
    with left(durable(strategy, folder)) as door:
        live(door, acts, until=12)

        def stop(state: Any, update: Any) -> Receipt:
            state.total.fill_(7.0)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(FedBuff, "receive", lambda self, state, update: stop(state, update))
            with pytest.raises(KeyboardInterrupt):
                live(door, acts)
        with pytest.raises(InputError, match="an act was interrupted half-way: start"):
            door.snapshot()
        with pytest.raises(InputError, match="an act was interrupted half-way: start"):
            live(door, acts)
    with left(durable(strategy, folder)) as door:
        live(door, acts)
        assert equal(door.server, server)


def test_a_sync_that_failed_is_never_trusted_again(tmp_path: Path) -> None:
    """The system may drop what it could not write, and report success the next time."""
    strategy = FedAsync()

    def fail(act: str, fd: int, pieces: Any) -> None:
        if act == "fsync":
            raise OSError(5, os.strerror(5))

    with left(durable(strategy, tmp_path)) as door:
        task = door.checkout(0, 0.0)
        update = LocalResult(trained(door.server, task), 3, 1, 0.1).answer(task, 1.0)
        files.before = fail
        try:
            with pytest.raises(InputError, match="the disk reports an error"):
                door.submit(update)
        finally:
            files.before = None
        assert door.server.version == 0
        with pytest.raises(InputError, match="takes no more until the server is started again"):
            door.submit(update)
    with left(durable(strategy, tmp_path)) as door:
        assert door.server.version in (0, 1)  # never acknowledged: either is right


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(InputError, match="a file stands where a folder should be"):
            durable(FedAsync(), folder).open()


# -- the disk table ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 3, 5])  # the sixth needs a slot beside those of five clients
def test_a_full_disk_of_a_table_is_named_and_its_update_folded_after_the_restart(
    rows: int, tmp_path: Path
) -> None:
    strategy = MRAsyncFL()
    acts = acts_of(strategy, UPDATES)
    server, receipts = whole(strategy, tmp_path / "whole")
    seen: list[Receipt] = []
    folder = tmp_path / "full"
    options: dict[str, Any] = {"table": "disk", "segment": 1500, "every": 1000}
    with left(durable(strategy, folder, **options)) as door:
        with file_limit(4096 + 128 * rows), pytest.raises(InputError, match=r"table.rows: the disk is full"):
            live(door, acts, seen.append)
        with pytest.raises(InputError, match="start the server of"):  # the fold had begun
            live(door, acts, seen.append)
        assert len(seen) == rows
    with left(durable(strategy, folder, **options)) as door:
        told = [door.receipt(receipt.number) for receipt in receipts]
        assert told[: rows + 1] == receipts[: rows + 1]  # the one that nobody was told of, too
        seen.append(receipts[rows])
        live(door, acts, seen.append)
        assert equal(door.server, server)
    assert seen == receipts


def test_after_a_restart_the_generation_before_still_has_its_rows(tmp_path: Path) -> None:
    """A disk table must not write over slots that only the older snapshot names: the newest may turn out damaged."""
    strategy = ACE(lr=0.5)
    acts = acts_of(strategy, UPDATES)
    server, _ = whole(strategy, tmp_path / "whole")
    folder = tmp_path / "run"
    with left(durable(strategy, folder, table="disk", every=3)) as door:
        live(door, acts, until=len(acts) - 24)
    with left(durable(strategy, folder, table="disk", every=1000)) as door:
        live(door, acts)
        newest = door.snapshots.path(door.snapshots.generations()[-1])
    data = bytearray(newest.read_bytes())
    data[100] ^= 1
    newest.write_bytes(data)
    with left(durable(strategy, folder, table="disk")) as door:
        assert len(door.replayed) > 12
        assert equal(door.server, server)


@pytest.mark.parametrize("what", ["missing", "short", "other"])
def test_a_table_whose_file_is_not_its_own_is_refused(what: str, tmp_path: Path) -> None:
    strategy = MRAsyncFL()
    with durable(strategy, tmp_path, table="disk") as door:
        live(door, acts_of(strategy, 6))
    rows = tmp_path / "table.rows"
    data = rows.read_bytes()
    if what == "missing":
        rows.unlink()
    else:
        rows.write_bytes(data[:4200] if what == "short" else b"x" * len(data))
    before = contents(tmp_path)
    with pytest.raises(InputError, match=r"table.rows.*put the run's own file back"):
        durable(strategy, tmp_path, table="disk").open()
    assert contents(tmp_path) == before
    rows.write_bytes(data)
    with left(durable(strategy, tmp_path, table="disk")) as again:
        assert equal(again.server, door.server)


# -- read-only folders ------------------------------------------------------------------------------------------


@contextmanager
def nobody() -> Iterator[None]:
    """Root may write everywhere; this is somebody who may not."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everyone may enter; pytest's own are root's."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_read_only_folder_is_named(open_folder: Path) -> None:
    folder = open_folder / "run"
    with left(durable(FedAsync(), folder)) as door:
        live(door, acts_of(FedAsync(), 4))
    (folder / "owner.lock").chmod(0o444)
    folder.chmod(0o555)
    before = contents(folder)
    with (
        nobody(),
        pytest.raises(InputError, match=r"owner.lock.*not allowed: choose a folder that can be written"),
    ):
        durable(FedAsync(), folder).open()
    assert contents(folder) == before
    folder.chmod(0o755)
    (folder / "owner.lock").chmod(0o644)
    with left(durable(FedAsync(), folder)) as again:
        assert equal(again.server, door.server)


def test_a_folder_that_becomes_read_only_costs_nothing(open_folder: Path) -> None:
    strategy, folder = MRAsyncFL(), open_folder / "run"
    acts = acts_of(strategy, UPDATES)
    server, receipts = whole(strategy, open_folder / "whole")
    seen: list[Receipt] = []
    with left(durable(strategy, folder, segment=3000)) as door:
        folder.chmod(0o555)
        with nobody():
            with pytest.raises(InputError, match="not allowed: choose a folder that can be written"):
                live(door, acts, seen.append)  # until the segment is full
            with pytest.raises(InputError, match="not allowed"):
                door.snapshot()
        folder.chmod(0o755)
        assert 1 < len(seen) < len(receipts)
        live(door, acts, seen.append)
        assert seen == receipts
    with left(durable(strategy, folder)) as door:
        assert equal(door.server, server)


# -- other versions ---------------------------------------------------------------------------------------------


def test_a_snapshot_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    with durable(FedAsync(), tmp_path) as door:
        live(door, acts_of(FedAsync(), 4))
    newest = door.snapshots.path(door.snapshots.generations()[-1])
    data = newest.read_bytes()
    magic, form, _, length = PREAMBLE.unpack(data[: PREAMBLE.size])
    text = data[PREAMBLE.size : PREAMBLE.size + length]
    checksum = zlib.crc32(text, zlib.crc32(struct.pack("<IQ", form + 1, length)))
    newest.write_bytes(PREAMBLE.pack(magic, form + 1, checksum, length) + data[PREAMBLE.size :])
    before = contents(tmp_path)
    with pytest.raises(InputError, match=r"has format 2, this afield reads 1: update afield"):
        durable(FedAsync(), tmp_path).open()
    assert contents(tmp_path) == before


def test_a_folder_of_a_newer_afield_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as then:
        then.setattr(live_module, "_version", lambda: "99.1.0")
        with durable(FedAsync(), tmp_path) as door:
            live(door, acts_of(FedAsync(), 4))
    before = contents(tmp_path)
    with pytest.raises(InputError, match=r"written by afield 99.1.0, which is newer than .*: update afield"):
        durable(FedAsync(), tmp_path).open()
    assert contents(tmp_path) == before


def test_a_folder_of_an_older_afield_is_taken_over_once_its_journal_is_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts = acts_of(FedAsync(), 12)
    with monkeypatch.context() as then:
        then.setattr(live_module, "_version", lambda: "0.0.9")
        with left(durable(FedAsync(), tmp_path)) as door:
            live(door, acts, until=12)
    before = contents(tmp_path)
    with pytest.raises(
        InputError, match=r"left by afield 0.0.9 .*: open and close it once with afield 0.0.9"
    ):
        durable(FedAsync(), tmp_path).open()
    assert contents(tmp_path) == before
    with monkeypatch.context() as then:
        then.setattr(live_module, "_version", lambda: "0.0.9")
        with durable(FedAsync(), tmp_path):
            pass
    with left(durable(FedAsync(), tmp_path)) as again:
        assert equal(again.server, door.server)
        live(again, acts, until=16)
    with left(durable(FedAsync(), tmp_path)) as more:  # its records are this version's
        assert equal(more.server, again.server)


def test_a_record_that_cannot_be_done_again_is_refused_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with left(durable(FedAsync(), tmp_path)) as door:
        live(door, acts_of(FedAsync(), 4))
    with monkeypatch.context() as broken:
        broken.setattr(FedAsync, "receive", lambda *_: 1 / 0)
        with pytest.raises(InputError, match=r"record 6 of .* cannot be done again \(division by zero\)"):
            durable(FedAsync(), tmp_path).open()
    with left(durable(FedAsync(), tmp_path)) as again:
        assert equal(again.server, door.server)
