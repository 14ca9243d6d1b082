"""`afield reproduce` and `afield tune` on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from afield.experiments.paper import papers

Command = Callable[..., Any]

TINY = """
name = "tiny"
[paper]
citation = "Nobody: Nothing (2020)"
what = "Table 9"
about = "one rule"
[model]
name = "linear"
[scenario]
clients = 4
data = { name = "digits", limit = 40 }
[stop]
updates = 6
[[rows]]
label = "mixing"
strategy = { name = "fedasync" }
[theirs]
mixing = [50.0]
[grid]
"local.rate" = [0.01, 0.5]
"""


@pytest.fixture
def tiny(here: Path) -> str:
    (here / "tiny.toml").write_text(TINY)
    return "tiny.toml"


def test_reproduce_alone_lists_the_presets(afield: Command) -> None:
    ended = afield("reproduce")
    assert (ended.status, ended.err) == (0, "")
    for name in papers():
        assert name in ended.out


def test_reproduce_runs_and_shows_the_result(afield: Command, here: Path, tiny: str) -> None:
    ended = afield("reproduce", tiny, "--seeds", "0,2")
    assert (ended.status, ended.err) == (0, "")
    assert "[2/2] mixing, seed 2: accuracy" in ended.out
    assert "Table 9: final accuracy (%)" in ended.out
    folder = here / "runs" / "tiny-paper"
    assert sorted(path.name for path in (folder / "mixing").iterdir()) == ["seed-0", "seed-2"]
    command = "`afield reproduce tiny.toml --scale paper --seeds 0,2`"
    assert command in (folder / "result.md").read_text()
    assert "0 runs" not in afield("reproduce", tiny, "--collect").out


def test_tune_prints_the_setting(afield: Command, tiny: str) -> None:
    ended = afield("tune", tiny)
    assert (ended.status, ended.err) == (0, "")
    assert "mixing: best by final accuracy (" in ended.out
    assert ended.out.splitlines()[-1].split(": ")[-1] in ("--set local.rate=0.01", "--set local.rate=0.5")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("reproduce", "nothing"), "nothing is neither a paper's preset nor a file"),
        (
            ("reproduce", "tiny.toml", "--seeds", "a"),
            "--seeds 'a' is not a list of whole numbers: write for ex",
        ),
        (("reproduce", "tiny.toml", "--seeds", "1,1"), "--seeds '1,1': give different seeds, 0 or above"),
        (("reproduce", "tiny.toml", "--data", "nowhere"), "--data nowhere is not a folder"),
        (("reproduce", "tiny.toml", "--only", "mixin"), "'mixin' is no row, column or variant of tiny"),
        (("run", "mr-asyncfl-table-1"), "makes a table or figure of a paper: afield reproduce runs it"),
        (("tune", "default"), "default has no [grid]: give one by --set-grid"),
    ],
)
def test_bad_input_is_one_line(afield: Command, tiny: str, arguments: tuple[str, ...], message: str) -> None:
    ended = afield(*arguments)
    assert ended.status == 2
    assert message in ended.err
    assert ended.err.count("\n") == 1
