"""Sweeps, runs that are trained together, and reproductions: stopped, taken up, and the same bits at the end."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stopping import RUNS, outcome, places, stopped_after, together
from tinypaper import quiet, written

from afield.core.errors import InputError
from afield.experiments import reproduce as reproducing
from afield.experiments.keep import Asking, StoppedError, finished, stored
from afield.experiments.plan import read_plan


@pytest.mark.parametrize("length", [17, 60])
def test_runs_together_go_on_in_the_same_blocks(length: int, tmp_path: Path) -> None:
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    list(together(whole, RUNS, again=False))
    stops, asking = 0, Asking()
    rows = together(pieces, RUNS, again=False, asking=asking)
    while stopped_after(rows, length, asking):
        stops += 1
        asking = Asking()
        rows = together(pieces, tuple(map(stored, places(pieces))), again=True, asking=asking)
    assert stops >= 2
    for one, two in zip(places(whole), places(pieces), strict=True):
        assert outcome(two) == outcome(one)
    assert not (pieces / "store").exists()


def test_a_start_in_the_middle_of_making_the_folders(tmp_path: Path) -> None:
    """Killed when some configs were written and others not: those name their method, these say "auto"."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    list(together(whole, RUNS, again=False))
    for number in (0, 2):
        shutil.copytree(whole / str(number), broken / str(number))
        (broken / str(number) / "summary.json").unlink()
    runs = tuple(
        stored(place) if place.exists() else run for place, run in zip(places(broken), RUNS, strict=True)
    )
    list(together(broken, runs, again=True))
    for one, two in zip(places(whole), places(broken), strict=True):
        assert outcome(two) == outcome(one)


def test_one_of_several_that_go_together_is_not_taken_up_alone(tmp_path: Path) -> None:
    asking = Asking()
    assert stopped_after(together(tmp_path, RUNS, again=False, asking=asking), 17, asking)
    with pytest.raises(InputError, match=r"/0 is trained together with others, .*: give the folder"):
        read_plan(tmp_path / "0")


# -- reproductions ----------------------------------------------------------------------------------------


def reproduced(folder: Path, **changes: Any) -> Callable[..., Path]:
    folder.mkdir(exist_ok=True)
    name = written(folder, scales={"smoke": {"stop": {"updates": 20}}}, **changes)
    return lambda **more: reproducing.reproduce(name, scale="smoke", out=folder / "out", say=quiet, **more)


def every(folder: Path) -> dict[str, Any]:
    return {
        str(place.parent.relative_to(folder)): outcome(place.parent) for place in folder.rglob("summary.json")
    }


@pytest.mark.parametrize("sweep", [{}, {"sweep": {"together": True, "limit": 3}}], ids=["alone", "together"])
def test_a_reproduction_goes_on_inside_the_run_that_was_stopped(
    sweep: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = reproduced(tmp_path / "whole", **sweep)()
    go, out = reproduced(tmp_path / "pieces", **sweep), tmp_path / "pieces" / "out"
    name = "run_together" if sweep else "run"
    inner = getattr(reproducing, name)
    seen = 0

    def interrupted(*arguments: Any, **options: Any) -> Any:
        """Ctrl-C after every 31 rows of the reproduction."""
        nonlocal seen
        for row in inner(*arguments, **options):
            seen += 1
            if seen % 31 == 0:
                os.kill(os.getpid(), signal.SIGINT)
            yield row

    monkeypatch.setattr(reproducing, name, interrupted)
    said = []
    while not (out / "result.md").is_file():
        done = set(out.rglob("summary.json"))
        try:
            go()
        except StoppedError as told:
            said.append(str(told))
            assert done <= set(out.rglob("summary.json"))  # none of them was begun anew
    assert len(said) >= 3
    file = tmp_path / "pieces" / "tiny.toml"
    command = f"afield reproduce {file} --scale smoke --out {out}"
    assert set(said) == {f"stopped, all is saved; go on by: {command}"}
    assert every(out) == every(whole)


def test_who_runs_everything_goes_on_with_the_shares_that_were_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, shares = {"sweep": {"together": True, "limit": 3}}, ((1, 2), (2, 2))
    for share in shares:
        whole = reproduced(tmp_path / "whole", **sweep)(share=share)
    go, out = reproduced(tmp_path / "pieces", **sweep), tmp_path / "pieces" / "out"
    inner = reproducing.run_together
    calls: list[tuple[str, bool]] = []

    def interrupted(prepared: Any, places: Any, store: Path, *, again: bool, asking: Any) -> Any:
        """Ctrl-C after 9 rows of each share."""
        calls.append((store.name, again))
        for number, row in enumerate(inner(prepared, places, store, again=again, asking=asking), 1):
            if number == 9 and not again:
                os.kill(os.getpid(), signal.SIGINT)
            yield row

    monkeypatch.setattr(reproducing, "run_together", interrupted)
    for share in shares:
        with pytest.raises(StoppedError, match=f"--share {share[0]}/2"):
            go(share=share)
    assert len(list(out.glob("store-*"))) == 2
    go()
    assert calls == [(f"store-{n}-of-2", again) for again in (False, True) for n in (1, 2)]
    assert every(out) == every(whole)
    assert not list(out.glob("store*"))


def test_a_stopped_group_of_other_settings_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = reproduced(tmp_path, sweep={"together": True, "limit": 16})
    inner = reproducing.run_together

    def interrupted(*arguments: Any, **options: Any) -> Any:
        for number, row in enumerate(inner(*arguments, **options), 1):
            if number == 9:
                os.kill(os.getpid(), signal.SIGINT)
            yield row

    with monkeypatch.context() as patch:
        patch.setattr(reproducing, "run_together", interrupted)
        with pytest.raises(StoppedError):
            go()
    out = go(settings=["local.rate=0.07"])
    places = list(out.rglob("summary.json"))
    assert places and all(stored(place.parent).local.rate == 0.07 for place in places)


def test_a_finished_group_whose_store_was_left_is_not_run_again(tmp_path: Path) -> None:
    """Killed after the last summary, before the store was removed."""
    go = reproduced(tmp_path, sweep={"together": True, "limit": 16})
    out = tmp_path / "out"
    inner, kept = shutil.rmtree, tmp_path / "kept"

    def saved(path: Any, **options: Any) -> None:
        if Path(path) == out / "store" and Path(path).exists():
            shutil.copytree(path, kept, dirs_exist_ok=True)
        inner(path, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", saved)
        go()
    shutil.copytree(kept, out / "store")
    assert list((out / "store").glob("*.snapshot"))
    before = {place: place.stat().st_mtime_ns for place in out.rglob("summary.json")}
    go()
    assert before == {place: place.stat().st_mtime_ns for place in out.rglob("summary.json")}
    assert all(finished(place.parent) for place in before)
