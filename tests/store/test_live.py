"""A durable server that is stopped anywhere goes on with the same bits; what cannot be stored says so."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from durably import acts_of, durable, first_day, live, trained
from playback import BATTERY, same

from afield.core.errors import InputError
from afield.core.server import Server
from afield.core.types import LocalResult, Receipt
from afield.store.journal import Journal
from afield.store.live import Durable
from afield.strategies import ACE, FedAsync, FedBuff, MRAsyncFL

NAMES = [name for name in BATTERY if name != "ace client"]  # there the clients have a memory of their own
UPDATES = 24


def equal(one: Server, two: Server) -> bool:
    """All that a server holds."""
    first, second = one.picture(), two.picture()
    leases = [(lease.task, lease.base, lease.correction) for lease in first.pop("leases").values()]
    others = [(lease.task, lease.base, lease.correction) for lease in second.pop("leases").values()]
    tasks = [task for task, _, _ in leases] == [task for task, _, _ in others]
    bases = all(torch.equal(a[1], b[1]) for a, b in zip(leases, others, strict=True))
    corrections = all(
        (a[2] is None and b[2] is None) or torch.equal(a[2], b[2])
        for a, b in zip(leases, others, strict=True)
    )
    return tasks and bases and corrections and same(first, second)


def whole(strategy: Any, folder: Path, updates: int = UPDATES) -> tuple[Server, list[Receipt]]:
    """A life without interruption."""
    receipts: list[Receipt] = []
    with durable(strategy, folder, every=1000) as door:
        live(door, acts_of(strategy, updates), receipts.append)
    return door.server, receipts


@contextmanager
def left(door: Durable) -> Iterator[Durable]:
    """As a crash leaves it: nothing is written at the end."""
    door.__enter__()
    try:
        yield door
    finally:
        door.journal.close()
        door.owner.free()


@pytest.mark.parametrize("name", NAMES)
def test_stopped_after_every_act_it_goes_on_with_the_same_bits(name: str, tmp_path: Path) -> None:
    strategy = BATTERY[name]
    acts = acts_of(strategy, UPDATES)
    server, receipts = whole(strategy, tmp_path / "whole")
    seen: list[Receipt] = []
    for stop in range(1, len(acts) + 1):
        with left(durable(strategy, tmp_path / "often", every=4, fsync="off")) as door:
            live(door, acts, seen.append, until=stop)
    assert seen == receipts
    with left(durable(strategy, tmp_path / "often", fsync="off")) as door:
        assert equal(door.server, server)
        assert door.acts == len(acts)


def test_replay_gives_the_receipts_that_were_given(tmp_path: Path) -> None:
    strategy = FedBuff(size=3)
    acts = acts_of(strategy, 10)
    seen: list[Receipt] = []
    with left(durable(strategy, tmp_path)) as door:
        live(door, acts, seen.append)
    with left(durable(strategy, tmp_path)) as door:
        assert door.replayed == seen
        assert len(seen) == 10


def test_an_update_counts_once_also_after_a_restart(tmp_path: Path) -> None:
    strategy = MRAsyncFL()
    with left(durable(strategy, tmp_path)) as door:
        task = door.checkout(2, 0.0)
        update = LocalResult(trained(door.server, task), 3, 1, 0.1).answer(task, 1.0)
        assert door.submit(update).refused == ""
        before = door.journal.number
        assert door.submit(update).refused == "closed"
        assert door.journal.number == before  # a refusal is not journalled
    with left(durable(strategy, tmp_path)) as door:
        assert door.submit(update).refused == "closed"
        other = door.checkout(2, 2.0)
        assert (other.number, other.count, other.version) == (1, 1, 1)


def test_a_batch_is_one_sync_and_its_second_twin_is_refused_also_in_the_replay(tmp_path: Path) -> None:
    from afield.store import files

    strategy, synced = FedAsync(), []
    with left(durable(strategy, tmp_path, fsync="batch")) as door:
        tasks = [door.checkout(client, 0.0) for client in range(4)]
        updates = [LocalResult(trained(door.server, t), 3, 1, 0.1).answer(t, 1.0) for t in tasks]
        updates.append(updates[0])
        updates.append(replace(updates[1], examples=0))
        files.before = lambda act, fd, pieces: synced.append((act, door.server.version))
        try:
            receipts = door.submit_all(updates)
        finally:
            files.before = None
        assert [r.refused for r in receipts] == ["", "", "", "", "closed", "no-examples"]
        assert synced == [("write", 0)] * 5 + [("fsync", 0)]  # all of it before the first fold
        server = door.server
    with left(durable(strategy, tmp_path, fsync="batch")) as door:
        assert equal(door.server, server)
        assert [r.refused for r in door.replayed] == ["", "", "", "", "closed"]


def test_acts_that_were_refused_are_refused_again(tmp_path: Path) -> None:
    with left(durable(FedAsync(), tmp_path)) as door:
        with pytest.raises(InputError, match="client 9 is unknown"):
            door.checkout(9, 0.0)
        with pytest.raises(InputError, match="FedAsync has no rounds"):
            door.close_round()
        task = door.checkout(1, 0.0)
        door.cancel(task)
        door.cancel(task)
        assert door.checkout(1, 0.0).number == 1
        server = door.server
    with left(durable(FedAsync(), tmp_path)) as door:
        assert equal(door.server, server)


def test_segments_are_dropped_once_no_kept_snapshot_needs_them_unless_all_are_kept(tmp_path: Path) -> None:
    strategy = FedBuff(size=3)
    for keep, folder in (("needed", tmp_path / "needed"), ("all", tmp_path / "all")):
        with durable(strategy, folder, every=3, segment=2000, keep=keep) as door:
            live(door, acts_of(strategy, 30))
            segments = door.journal.segments()
            assert len(door.snapshots.generations()) == 2
            if keep == "all":
                assert segments[0] == 1 and len(segments) > 10
                records = list(Journal(folder).replay())
                assert len(records) == door.acts
            else:
                assert len(segments) < 8
                assert segments[0] == door.snapshots.oldest[1]["journal"] + 1


def test_a_damaged_newest_snapshot_is_made_good_by_the_one_before_and_the_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = ACE(lr=0.5)
    with left(durable(strategy, tmp_path, every=7)) as door:
        live(door, acts_of(strategy, UPDATES))
        server, newest = door.server, door.snapshots.path(door.snapshots.generations()[-1])
    data = bytearray(newest.read_bytes())
    data[-70] ^= 1
    newest.write_bytes(data)
    with caplog.at_level(logging.WARNING), left(durable(strategy, tmp_path, every=7)) as door:
        assert equal(door.server, server)
    assert "trying the generation before" in caplog.text


@pytest.mark.parametrize("what", ["strategy", "clients", "model", "about"])
def test_a_folder_of_another_server_is_refused_and_left_as_it_was(what: str, tmp_path: Path) -> None:
    with left(Durable(first_day(FedBuff(size=3)), tmp_path, about={"model": "linear"})) as door:
        live(door, acts_of(FedBuff(size=3), 4))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "owner.lock"}
    about = {"model": "linear"}
    server = first_day(FedBuff(size=3))
    if what == "strategy":
        server = first_day(ACE())
    elif what == "clients":
        server = first_day(FedBuff(size=3), clients=6)
    elif what == "model":
        server = Server(FedBuff(size=3), torch.zeros(28), 5, seed=3)
    else:
        about = {"model": "mlp"}
    with (
        pytest.raises(InputError, match="is of a server with .*: give what it was begun with"),
        Durable(server, tmp_path, about=about),
    ):
        pass
    assert before == {
        path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "owner.lock"
    }


def test_a_journal_without_its_snapshot_is_refused(tmp_path: Path) -> None:
    with left(durable(FedAsync(), tmp_path)) as door:
        live(door, acts_of(FedAsync(), 4))
        paths = [door.snapshots.path(generation) for generation in door.snapshots.generations()]
    for path in paths:
        path.unlink()
    with pytest.raises(InputError, match="a journal but no snapshot"):
        durable(FedAsync(), tmp_path).__enter__()


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
            durable(strategy, tmp_path).__enter__()
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
        with pytest.raises(InputError, match="interrupted while it was folded"):
            door.snapshot()
        with pytest.raises(InputError, match="interrupted while it was folded"):
            live(door, acts)
    with left(durable(strategy, folder)) as door:
        live(door, acts)
        assert equal(door.server, server)


def test_a_sync_that_failed_is_never_trusted_again(tmp_path: Path) -> None:
    """The system may drop what it could not write, and report success the next time."""
    from afield.store import files

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


def sealed(folder: Path) -> bool:
    """Make a folder read-only, also for root; False where this machine has no way."""
    import fcntl

    folder.chmod(0o555)
    if not os.access(folder, os.W_OK):
        return True
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(
            fd, 0x40086602, (0x10 | 0x80000).to_bytes(8, "little")
        )  # FS_IOC_SETFLAGS: immutable, extents
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def unsealed(folder: Path) -> None:
    import fcntl

    if os.geteuid() == 0:
        fd = os.open(folder, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, 0x40086602, (0x80000).to_bytes(8, "little"))
        finally:
            os.close(fd)
    folder.chmod(0o755)


def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with left(durable(FedAsync(), folder, segment=600)) as door:
        live(door, acts_of(FedAsync(), 4))
    (folder / "owner.lock").unlink()
    if not sealed(folder):
        pytest.skip("no way to make a folder read-only for this user here")
    try:
        with pytest.raises(InputError, match="owner.lock.*not allowed: choose a folder that can be written"):
            durable(FedAsync(), folder).__enter__()
    finally:
        unsealed(folder)
    with left(durable(FedAsync(), folder)) as again:
        assert equal(again.server, door.server)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(InputError, match="a file stands where a folder should be"):
            durable(FedAsync(), folder).__enter__()
