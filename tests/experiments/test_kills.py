"""Runs that are killed at random moments, inside writes, syncs and renames too, until they are done."""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playback import BATTERY, tabled
from stopping import RUNS, SCENES, of_battery, of_scene, outcome, places, together, whole

from afield.core.errors import InputError
from afield.experiments.config import Config, Saving
from afield.experiments.folder import CONFIG
from afield.experiments.keep import finished, stored
from afield.experiments.run import prepare, run
from afield.store import files

KILLS = 8  # of each run; then it is let go on to its end
OFTEN = {"versions": 2}  # versions between snapshots
METHODS = ("loop", "vmap", "workers")


def killed(act: Callable[[], None]) -> bool:
    """Do it in a forked process; whether that was killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed: see what it printed"
    return os.WIFSIGNALED(status)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def doomed(rows: Any, draw: random.Random) -> None:
    """Go on, and be killed: by the clock, after some row, or in the middle of an act of the store."""
    how, left = draw.choice(("clock", "row", "act")), draw.randrange(12)

    def before(act: str, fd: int, pieces: Sequence[Any]) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            if act == "write" and fd >= 0:  # some of it gets to the disk
                whole = b"".join(bytes(memoryview(piece).cast("B")) for piece in pieces)
                os.write(fd, whole[: draw.randrange(len(whole) + 1)])
            die()

    if how == "clock":  # the default action of this signal ends the process wherever it is
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.01, 0.15))
    elif how == "act":
        files.before = before
    for number, _ in enumerate(rows):
        if how == "row" and number == left:
            die()


def until_done(begin: Callable[[], Any], draw: random.Random) -> int:
    """Kill what `begin` begins or takes up, again and again, then let it end; how often it was killed."""
    for kills in range(KILLS):
        own = random.Random(draw.random())  # what a forked process draws is lost with it
        if not killed(lambda own=own: doomed(begin(), own)):  # type: ignore[misc]
            return kills
    assert not killed(lambda: [None for _ in begin()] and None)
    return KILLS


def cases() -> dict[str, Config]:
    found = {}
    for name, strategy in BATTERY.items():
        for table in ("memory", "disk") if tabled(strategy) else ("memory",):
            found[f"{name}, {table}"] = of_battery(name, runtime={"table": table, "snapshots": OFTEN})
    for name in SCENES:
        changed = {**SCENES[name].get("runtime", {}), "snapshots": OFTEN}
        found[f"scene {name}"] = of_scene(name, runtime=changed)
    for method in METHODS:
        for table in ("memory", "disk"):
            options = {"training": {"method": method}, "runtime": {"table": table, "snapshots": OFTEN}}
            found[f"{method}, {table}"] = of_battery("ace int8", **options)
    return found


def alone(chosen: Config, folder: Path) -> Any:
    if finished(folder):  # killed after its last word: all that is left to do is to clear away
        with pytest.raises(InputError, match="is finished"):
            list(run(prepare(stored(folder)), folder, again=True))
        return ()
    again = folder.exists()
    return run(prepare(stored(folder) if (folder / CONFIG).exists() else chosen), folder, again=again)


@pytest.mark.slow
def test_200_kills_leave_no_trace(tmp_path: Path) -> None:
    draw, kills, wrong = random.Random(5), Counter[str](), []
    for number, (name, chosen) in enumerate(cases().items()):
        folder = tmp_path / str(number)
        kills[name] = until_done(lambda c=chosen, f=folder / "killed": alone(c, f), draw)  # type: ignore[misc]
        ours, right = outcome(folder / "killed"), whole(chosen, folder / "whole")
        wrong += [
            f"{name}: {file}" for file in ours.keys() | right.keys() if ours.get(file) != right.get(file)
        ]
        assert not (folder / "killed" / "store").exists()
    print(
        f"{kills.total()} kills of {len(kills)} runs, {len(wrong)} of them with other bits", file=sys.stderr
    )
    assert not wrong
    assert kills.total() >= 200


@pytest.mark.slow
def test_kills_of_runs_that_go_together(tmp_path: Path) -> None:
    runs = tuple(replace(run, runtime=replace(run.runtime, snapshots=Saving(versions=2))) for run in RUNS)
    list(together(tmp_path / "whole", runs, again=False))
    draw, kills = random.Random(6), 0
    for number in range(4):
        folder = tmp_path / str(number)

        def begin(folder: Path = folder) -> Any:
            chosen = [
                stored(place) if (place / CONFIG).exists() else run
                for place, run in zip(places(folder), runs, strict=True)
            ]
            return together(folder, tuple(chosen), again=folder.exists())

        kills += until_done(begin, draw)
        for one, two in zip(places(tmp_path / "whole"), places(folder), strict=True):
            assert outcome(two) == outcome(one)
    assert kills >= 12
