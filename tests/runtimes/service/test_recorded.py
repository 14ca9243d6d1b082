"""A run folder as rows: all of it, in order; as it grows; and after it was cut back."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tiny import rows_of, tiny

from afield.core.errors import InputError
from afield.core.types import Receipt
from afield.experiments import folder as folder_of_runs
from afield.experiments.folder import write_receipts
from afield.experiments.run import prepare
from afield.experiments.run import run as run_into
from afield.runtimes.service.recorded import COLUMNS, Recorded


def of_kind(recorded: Recorded, kind: str) -> list[dict[str, Any]]:
    return [dict(row.values) for row in recorded.after(0, 10**6) if row.kind == kind]


def when(kind: str, values: dict[str, Any]) -> float:
    return float(values[{"task": "started", "measurement": "time"}.get(kind, "arrived")])


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, list[Any], list[Any]]:
    return (tmp_path / "run", *rows_of(tiny(), tmp_path / "run"))


def test_everything_is_told_once_and_in_order(run: tuple[Path, list[Any], list[Any]]) -> None:
    folder, receipts, measured = run
    recorded = Recorded(folder)
    rows = recorded.after(0, 10**6)
    assert [row.number for row in rows] == list(range(1, recorded.last + 1))
    wanted = [{name: getattr(r, name) for name in COLUMNS} | {"refused": ""} for r in receipts]
    assert of_kind(recorded, "receipt") == wanted
    assert of_kind(recorded, "measurement") == [row.row() for row in measured]
    tasks = {(r.number, r.client, r.base, r.started) for r in receipts}
    found = {(t["number"], t["client"], t["version"], t["started"]) for t in of_kind(recorded, "task")}
    assert found == tasks and len(tasks) == len(receipts)
    times = [when(row.kind, dict(row.values)) for row in rows if row.kind != "shares"]
    assert times == sorted(times)
    assert of_kind(recorded, "shares")[-1] == recorded.shares.told()
    told = recorded.status()
    assert (told["state"], told["clock"], told["updates"]) == ("finished", "virtual", len(receipts))
    assert told["now"] == max(receipts[-1].arrived, measured[-1].time)
    assert told["version"] == receipts[-1].version


def test_pages_of_rows_make_up_the_whole(run: tuple[Path, list[Any], list[Any]]) -> None:
    recorded = Recorded(run[0])
    pages, after = [], 0
    while page := recorded.after(after, 7, first=True):
        assert len(page) <= 7
        pages.extend(page)
        after = page[-1].number
    assert pages == recorded.after(0, 10**6)
    assert recorded.after(0, 7) == pages[-7:]


def test_refused_updates_are_told_as_such(run: tuple[Path, list[Any], list[Any]]) -> None:
    folder, receipts, _ = run
    refused = dataclasses.replace(receipts[-1], number=10**6, refused="too-stale", weight=9e9)
    write_receipts([refused], folder / "receipts" / "00001.parquet")
    recorded = Recorded(folder)
    assert [row["refused"] for row in of_kind(recorded, "refusal")] == ["too-stale"]
    assert recorded.status()["updates"] == len(receipts) == recorded.shares.updates


def test_a_growing_folder_is_followed_and_a_line_half_written_waits(tmp_path: Path) -> None:
    done, _, _ = tmp_path / "run", *rows_of(tiny(), tmp_path / "run")
    lines = (done / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (done / "summary.json").unlink()
    parts = sorted((done / "receipts").glob("*.parquet"))
    aside = tmp_path / "aside.parquet"
    os.replace(parts[0], aside)
    (done / "metrics.jsonl").write_bytes(lines[0] + lines[1][:9])
    recorded = Recorded(done)
    assert (recorded.last, recorded.status()["state"]) == (1, "running")

    async def more() -> list[Any]:
        with (done / "metrics.jsonl").open("ab") as file:
            file.write(lines[1][9:])
        first = await recorded.news(1, 5.0)
        os.replace(aside, parts[0])
        return first + await recorded.news(2, 5.0)

    rows = asyncio.run(more())
    assert [row.number for row in rows] == list(range(2, recorded.last + 1))
    assert rows[0].kind == "measurement" and dict(rows[0].values) == json.loads(lines[1])
    assert {row.kind for row in rows[1:]} == {"task", "receipt", "shares"}


def test_a_running_simulation_shows_its_receipts_at_every_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of seven, snapshots after every other version: each receipt is told once, in its order."""
    monkeypatch.setattr(folder_of_runs, "ROWS", 7)
    snapshots = {"runtime": {"snapshots": {"seconds": 0.0, "versions": 2}}}
    prepared, folder = prepare(tiny(**snapshots)), tmp_path / "run"
    recorded: Recorded | None = None
    early: list[int] = []
    rows = []
    for row in run_into(prepared, folder):
        rows.append(row)
        if recorded is None and (folder / "config.toml").exists():
            recorded = Recorded(folder)
        elif recorded is not None:
            recorded.look()
            early.append(len(of_kind(recorded, "receipt")))
    assert recorded is not None
    recorded.look()
    receipts = [row for row in rows if isinstance(row, Receipt)]
    assert [row["number"] for row in of_kind(recorded, "receipt")] == [row.number for row in receipts]
    assert of_kind(recorded, "reset") == [] and early == sorted(early)
    assert any(count % 7 for count in early)  # not only what whole files have
    assert not list((folder / "receipts").glob("*.part"))


@pytest.mark.parametrize("what", ["metrics", "receipts", "metrics rewritten"])
def test_a_run_that_was_cut_back_is_told_anew(what: str, run: tuple[Path, list[Any], list[Any]]) -> None:
    folder, receipts, _ = run
    recorded = Recorded(folder)
    before, lines = recorded.last, (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    if what == "receipts":
        (folder / "receipts" / "00000.parquet").unlink()
        write_receipts(receipts[:3], folder / "receipts" / "00000.parquet")
    else:
        # Cut, and in the second case already as long as it was, with other times on the wall.
        new = [line.replace(b'"wall": ', b'"wall": 1') for line in lines]
        (folder / "metrics.jsonl").write_bytes(b"".join(lines[:2] if what == "metrics" else new))
    recorded.look()
    rows = recorded.after(before, 10**6)
    assert rows[0].kind == "reset" and rows[0].number == before + 1
    fresh = Recorded(folder)
    assert [(row.kind, row.values) for row in rows[1:]] == [(r.kind, r.values) for r in fresh.after(0, 10**6)]
    # Who comes now sees none of the past that is gone.
    assert recorded.after(0, 10**6) == rows
    recorded.look()
    assert recorded.last == rows[-1].number


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.toml is missing"):
        Recorded(tmp_path)


def test_a_folder_without_receipts_still_has_its_curve(tmp_path: Path) -> None:
    _, measured = rows_of(tiny(runtime={"receipts": False}), tmp_path / "run")
    recorded = Recorded(tmp_path / "run")
    assert {row.kind for row in recorded.after(0)} == {"measurement"} and recorded.last == len(measured)
