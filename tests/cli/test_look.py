"""`afield report`, `afield figure` and `afield compare --latex`, from a real run to what is looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from afield.reports import load

from .conftest import Command

SMALL = ("--set", "stop.time=2", "--set", "local.epochs=1", "--set", "scenario.clients=6")


@pytest.fixture
def made(afield: Command, here: Path) -> Path:
    assert (
        afield("run", "--strategy", "fedbuff", "--set", "strategy.size=2", *SMALL, "--out", "one").status == 0
    )
    return here / "one"


def test_a_report_of_a_run(afield: Command, made: Path, here: Path) -> None:
    ended = afield("report", "one")
    assert (ended.status, ended.out.strip(), ended.err) == (0, "Report report.html", "")
    text = (here / "report.html").read_text(encoding="utf-8")
    assert "<h1>fedbuff</h1>" in text
    # What the page says makes the line again does: the same event log.
    assert "afield run one/config.toml" in text
    assert afield("run", "one/config.toml", "--out", "again").status == 0
    assert load.load("again").receipts.equals(load.load("one").receipts)


def test_a_run_tells_of_its_clients(made: Path) -> None:
    told = json.loads((made / "clients.json").read_text())
    assert [sum(row) for row in told["labels"]] == told["examples"]
    assert len(told["duration"]) == 6
    assert not told["relabelled"]


def test_figures(afield: Command, made: Path, here: Path) -> None:
    for kind in ("accuracy", "partition", "timeline"):
        ended = afield("figure", "one", "--kind", kind, "-o", f"{kind}.pdf")
        assert (ended.status, ended.out.strip()) == (0, f"Figure {kind}.pdf")
        assert (here / f"{kind}.pdf").read_bytes().startswith(b"%PDF")


def test_latex_and_nothing_else(afield: Command, made: Path) -> None:
    out = afield("compare", "one", "--latex").out
    assert out.startswith("\\begin{table}\n")
    assert out.endswith("\\end{table}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("report", "one", "-o", "page.pdf"), "--out page.pdf is no page: let it end in .html"),
        (("report", "one", "--target", "85"), "--target 85.0 is outside (0, 1]: give a share, such as 0.85"),
        (("report", "nowhere"), "nowhere is not a folder"),
        (
            ("figure", "one", "-o", "f.gif"),
            "--out f.gif is no kind of picture: let it end in .pdf, .svg, .png",
        ),
    ],
)
def test_bad_input_is_one_line(afield: Command, arguments: tuple[str, ...], message: str) -> None:
    ended = afield(*arguments)
    assert (ended.status, ended.err) == (2, f"afield: {message}\n")
