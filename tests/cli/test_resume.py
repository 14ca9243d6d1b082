"""`afield resume`: sweeps go on at the run that was stopped, and what cannot go on is told in one line."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stopping import outcome
from tiny import TINY

from afield.cli import run as command
from afield.experiments.codec import dumps

Command = Callable[..., Any]
RACE = TINY | {
    "name": "race",
    "seeds": [0, 1],
    "variants": [
        {"label": "mixing"},
        {"label": "rounds", "strategy": {"name": "fedavg"}},
        {"label": "rows", "strategy": {"name": "ace"}, "runtime": {"table": "disk"}},
    ],
}


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ctrl-C after every so many rows."""

    def every(count: int) -> None:
        for name in ("run_one", "run_together"):
            monkeypatch.setattr(command, name, breaking(getattr(command, name), count))

    return every


def breaking(inner: Any, count: int) -> Any:
    seen = 0

    def rows(*arguments: Any, **options: Any) -> Any:
        nonlocal seen
        for row in inner(*arguments, **options):
            seen += 1
            if seen % count == 0:
                os.kill(os.getpid(), signal.SIGINT)
            yield row

    return rows


def outcomes(folder: Path) -> dict[str, Any]:
    return {file.parent.name: outcome(file.parent) for file in folder.glob("*/summary.json")}


@pytest.mark.parametrize("together", [False, True])
def test_a_sweep_goes_on_at_the_first_unfinished_run(
    afield: Command, here: Path, interrupted: Callable[[int], None], together: bool
) -> None:
    (here / "race.toml").write_text(dumps(RACE | {"sweep": {"together": together}}))
    assert afield("run", "race.toml", "--out", "whole").status == 0
    interrupted(37)
    ended = afield("run", "race.toml", "--out", "pieces")
    stops = 0
    while ended.status == 130:
        stops += 1
        assert ended.err == "afield: stopped, all is saved; go on by: afield resume pieces\n"
        done = set((here / "pieces").glob("*/summary.json"))
        times = [path.stat().st_mtime_ns for path in sorted(done)]
        ended = afield("resume", "pieces")
        assert [path.stat().st_mtime_ns for path in sorted(done)] == times  # not run again
    assert (ended.status, ended.err) == (0, "")
    assert stops >= 3
    assert len(outcomes(here / "whole")) == 6
    assert outcomes(here / "pieces") == outcomes(here / "whole")
    assert {path.name for path in (here / "pieces").iterdir()} == {p.name for p in (here / "whole").iterdir()}
    again = afield("resume", "pieces")
    assert again.status == 2
    assert again.err.startswith("afield: pieces is finished, there is nothing to resume: afield compare")


def test_a_killed_sweep_is_finished_and_a_store_that_was_left_is_removed(
    afield: Command, here: Path, interrupted: Callable[[int], None]
) -> None:
    (here / "race.toml").write_text(dumps(RACE | {"seeds": [0]}))
    assert afield("run", "race.toml", "--out", "whole").status == 0
    interrupted(30)
    assert afield("run", "race.toml", "--out", "pieces").status == 130
    (first,) = (here / "pieces").glob("*/summary.json")
    (first.parent / "store").mkdir()  # as when its process was killed after the summary
    (first.parent / "store" / "0000000001.snapshot").write_text("")
    while (ended := afield("resume", "pieces")).status == 130:
        pass
    assert ended.status == 0
    assert outcomes(here / "pieces") == outcomes(here / "whole")
    assert not list((here / "pieces").rglob("store"))


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("nowhere", "nowhere is no folder: give that of a run, as `afield run` made it"),
        ("empty", "empty holds no run: it has no config.toml; give the folder of a run"),
    ],
)
def test_what_is_no_run_is_told(afield: Command, here: Path, folder: str, text: str) -> None:
    (here / "empty").mkdir()
    ended = afield("resume", folder)
    assert (ended.status, ended.err) == (2, f"afield: {text}\n")
