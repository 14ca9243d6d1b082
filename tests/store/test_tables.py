"""Snapshots of states with tables, in memory and on disk: whoever goes on from one gives the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playback import BATTERY, Play, play, same, tabled

from afield.core.places import tables
from afield.store.kinds import kinds_of
from afield.store.snapshot import Snapshots

BEATS = 30
TABLED = [name for name, strategy in BATTERY.items() if tabled(strategy)]


def taken(player: Play) -> dict[str, Any]:
    """Everything of a player that changes."""
    server = player.server
    return {
        "state": server.state,
        "versions": server.versions,
        "leases": server.leases,
        "counts": server.counts,
        "issued": server.issued,
        "tasks": player.tasks,
        "held": player.held,
        "beats": player.beats,
    }


def resumed(name: str, table: str, folder: Path, snapshots: Snapshots) -> Play:
    """A new process: nothing but the folder."""
    player = play(BATTERY[name])
    found = snapshots.newest()
    assert found is not None
    value, _, generation = found
    server = player.server
    server.state, server.versions, server.leases = value["state"], value["versions"], value["leases"]
    server.counts, server.issued = value["counts"], value["issued"]
    server.keep_tables(table, folder, generation)
    return Play(server, value["tasks"], value["held"], value["beats"])


@pytest.mark.parametrize("table", ["memory", "disk"])
@pytest.mark.parametrize("name", TABLED)
def test_going_on_from_a_snapshot_gives_the_same_bits(name: str, table: str, tmp_path: Path) -> None:
    straight = play(BATTERY[name])
    expected = straight.run(BEATS)
    player = play(BATTERY[name], table=table, folder=tmp_path)
    kinds = kinds_of(straight.server.state, taken(straight))
    snapshots = Snapshots(tmp_path / "snapshots", kinds)
    receipts = []
    for beat in range(BEATS):
        if beat in (4, 11, 13, 20):
            snapshots.write(taken(player), {"beat": beat})
        if beat in (6, 12, 16, 27):  # beats since the snapshot are lost, and played again
            snapshots = Snapshots(tmp_path / "snapshots", kinds)
            player = resumed(name, table, tmp_path, snapshots)
            while player.beats < beat:
                assert player.beats >= beat - 7
                assert player.beat() == receipts[player.beats - 1]
        receipts.append(player.beat())
    assert receipts == expected
    assert same(player.server.state, straight.server.state)
    files = [kept.file for _, kept in tables(player.server.state)]
    assert files and all((file is not None) == (table == "disk") for file in files)
