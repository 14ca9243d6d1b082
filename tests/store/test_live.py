"""A durable server that is stopped anywhere goes on with the same bits; what cannot be stored says so."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from durably import acts_of, durable, equal, left, live, trained, whole
from playback import BATTERY

from afield.core.errors import InputError
from afield.core.server import Server
from afield.core.types import LocalResult, Receipt
from afield.store import files
from afield.store.journal import Journal
from afield.store.live import Durable
from afield.strategies import ACE, FedAsync, FedBuff, MRAsyncFL

NAMES = [name for name in BATTERY if name != "ace client"]  # there the clients have a memory of their own
UPDATES = 24


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


@pytest.mark.parametrize(
    "end", ["crash", "close"]
)  # the receipt comes from the journal, or from the snapshot
def test_a_retry_gets_its_first_receipt_also_after_a_restart(end: str, tmp_path: Path) -> None:
    strategy = MRAsyncFL()
    with durable(strategy, tmp_path) as door:
        task, other = door.checkout(2, 0.0), door.checkout(3, 0.0)
        update = LocalResult(trained(door.server, task), 3, 1, 0.1).answer(task, 1.0)
        receipt = door.submit(update)
        assert receipt.refused == "" and receipt.version == 1
        before = door.journal.number
        assert door.submit(replace(update, arrived=9.0)) == receipt
        assert door.journal.number == before  # it is not journalled again
        server = door.server
        if end == "crash":
            door.leave()
            door._since = 0
    for _ in range(2):
        with durable(strategy, tmp_path) as door:
            assert door.submit(update) == receipt == door.receipt(task.number)
            forged = replace(update, task=replace(task, client=3))
            assert door.submit(forged).refused == "closed"  # the same number, another task
            assert (door.task(task.number), door.task(other.number)) == (None, other)
            assert equal(door.server, server)
    with durable(strategy, tmp_path) as door:
        third = door.checkout(2, 2.0)
        assert (third.number, third.count, third.version) == (2, 1, 1)


def test_only_so_many_receipts_are_remembered(tmp_path: Path) -> None:
    updates = []
    with durable(FedAsync(), tmp_path, remember=2) as door:
        for client in range(4):
            task = door.checkout(client, 0.0)
            updates.append(LocalResult(trained(door.server, task), 3, 1, 0.1).answer(task, 1.0))
            door.submit(updates[-1])
    with durable(FedAsync(), tmp_path, remember=2) as door:
        assert [r.refused for r in door.submit_all(updates)] == ["closed", "closed", "", ""]
        assert list(door.receipts) == [2, 3]


def test_a_batch_is_one_sync_and_its_second_twin_gets_the_receipt_of_the_first(tmp_path: Path) -> None:
    strategy, synced = FedAsync(), []
    with left(durable(strategy, tmp_path, fsync="batch")) as door:
        tasks = [door.checkout(client, 0.0) for client in range(4)]
        updates = [LocalResult(trained(door.server, t), 3, 1, 0.1).answer(t, 1.0) for t in tasks]
        updates.append(replace(updates[0], arrived=2.0))
        updates.append(replace(updates[1], examples=0))
        files.before = lambda act, fd, pieces: synced.append((act, door.server.version))
        try:
            receipts = door.submit_all(updates)
        finally:
            files.before = None
        assert [r.refused for r in receipts] == ["", "", "", "", "", "no-examples"]
        assert receipts[4] == receipts[0]
        # all of it, at once, before the first fold; the last is the note that the rest is on the disk
        assert synced == [("write", 0), ("fsync", 0), ("write", 0)]
        server = door.server
    with left(durable(strategy, tmp_path, fsync="batch")) as door:
        assert equal(door.server, server)
        assert door.replayed == receipts[:4]


def test_an_update_that_gets_too_stale_within_its_batch_is_refused_also_in_the_replay(tmp_path: Path) -> None:
    def fresh() -> Durable:
        return Durable(Server(FedAsync(), torch.zeros(3), 5, max_staleness=1), tmp_path)

    with left(fresh()) as door:
        tasks = [door.checkout(client, 0.0) for client in range(4)]
        updates = [LocalResult(torch.ones(3), 3, 1, 0.1).answer(t, 1.0) for t in tasks]
        receipts = door.submit_all([*updates, updates[3]])
        assert [r.refused for r in receipts] == ["", "", "too-stale", "too-stale", "too-stale"]
        server = door.server
    with left(fresh()) as door:
        assert equal(door.server, server)
        assert door.replayed == receipts[:4]


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


def test_snapshots_take_a_part_of_the_time_at_most(tmp_path: Path) -> None:
    strategy = FedAsync(0.5)
    taken = {}
    for share in (1.0, 1e-9):
        folder = tmp_path / str(share)
        with left(durable(strategy, folder, every=1, share=share, fsync="off")) as door:
            live(door, acts_of(strategy, 8))
            taken[share] = max(door.snapshots.generations())
            first = door.server.state.params.clone()
        with left(durable(strategy, folder)) as door:  # the journal has what no snapshot has
            assert torch.equal(door.server.state.params, first)
    assert taken[1.0] - taken[1e-9] >= 5
