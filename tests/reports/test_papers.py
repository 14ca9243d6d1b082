"""Results from run folders made by hand: heat maps, curves, bars, and a plan that is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from afield.reports import figures, papers
from afield.reports.load import LoadError

PAPER: dict[str, Any] = {
    "citation": "Nobody (2020)",
    "what": "Figure 1",
    "about": "made by hand",
    "cost": "",
    "kind": "table",
    "metric": "final",
    "x": ["versions"],
    "y": ["accuracy"],
    "hidden": {},
    "extras": [],
    "open": [],
    "notes": [],
}
Numbers = dict[tuple[str, str, str], list[float]]  # (row, column, variant) -> final accuracy per seed


def made(folder: Path, numbers: Numbers, theirs: dict[str, Any] | None = None, **paper: Any) -> Path:
    """A reproduction whose runs have two evaluations each."""
    cells = []
    for place, ((row, column, variant), finals) in enumerate(numbers.items()):
        cells.append({"row": row, "column": column, "variant": variant, "folder": f"cell{place}"})
        for seed, final in enumerate(finals):
            run = folder / f"cell{place}" / f"seed-{seed}"
            run.mkdir(parents=True)
            (run / "config.toml").write_text(f'label = "{row}"\nseed = {seed}\n')
            start = {
                "time": 0.0,
                "wall": 0.0,
                "version": 0,
                "updates": 0,
                "steps": 0,
                "accuracy": 0.1,
                "loss": 2.3,
            }
            end = {
                **start,
                "time": 1.0,
                "version": 10,
                "updates": 20,
                "steps": 60,
                "accuracy": final,
                "train_loss": 1.5,
            }
            (run / "metrics.jsonl").write_text(json.dumps(start) + "\n" + json.dumps(end) + "\n")
            summary = {"ended": "updates", "wall": 30.0, "together": 2, "device": "GPU", "contributors": 7}
            (run / "summary.json").write_text(json.dumps(summary))
    axes = {
        axis: list(dict.fromkeys(key[number] for key in numbers))
        for number, axis in enumerate(("rows", "columns", "variants"))
    }
    plan = {"name": "hand", "scale": "paper", "command": "afield reproduce hand", "stand_in": False}
    plan |= {"paper": PAPER | paper, "axes": axes, "theirs": theirs or {}, "cells": cells}
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def test_a_heat_map_of_choices(tmp_path: Path) -> None:
    numbers = {
        (row, column, beta): [accuracy, accuracy + 0.02]
        for row, column, best in (("p 1", "q 1", "0.0"), ("p 1", "q 2", "1.0"), ("p 2", "q 1", "0.5"))
        for beta, accuracy in (("0.0", 0.5), ("0.5", 0.5), ("1.0", 0.5))
        for accuracy in [accuracy + 0.1 * (beta == best)]
    }
    theirs = {"p 1": [0, "0.5 (Δ0.0 1.2, Δ1.0 0.3)"], "p 2": ["0.5", []]}
    folder = made(tmp_path, numbers, theirs, kind="heatmap")
    outcome = papers.write(folder)
    text = (folder / "result.md").read_text()
    first = "0.0 (Δ0.0 0.00, Δ1.0 10.00); paper 0"
    second = "1.0 (Δ0.0 10.00, Δ1.0 0.00); paper 0.5 (Δ0.0 1.2, Δ1.0 0.3)"
    assert f"| p 1 | {first} | {second} |" in text
    assert "| p 2 | 0.5 (Δ0.0 10.00, Δ1.0 10.00); paper 0.5 | - |" in text
    assert "Best, of 3 cells: 0.0 in 1, 0.5 in 1, 1.0 in 1. 2 of 3 cells choose as the paper does." in text
    assert figures._written(outcome, 0, 1, ours=False) == "0.5\nΔ0.0 1.2\nΔ1.0 0.3"
    assert outcome.chosen("p 2", "q 2") is None
    assert figures._field(outcome, ours=True)[0].tolist() == [0.0, 1.0]
    assert figures._field(outcome, ours=False)[0].tolist() == [0.0, 0.5]
    assert (folder / "figure.png").stat().st_size > 1000


def test_variants_are_ranked_within_each_row_and_column(tmp_path: Path) -> None:
    numbers = {
        ("delay 1", "even", "a"): [0.8],
        ("delay 1", "even", "b"): [0.7],
        ("delay 5", "even", "a"): [0.6],
        ("delay 5", "even", "b"): [0.65],
    }
    theirs = {row: {"a": [80.0], "b": [70.0]} for row in ("delay 1", "delay 5")}
    outcome = papers.gather(made(tmp_path, numbers, theirs))
    found = dict(papers.rankings(outcome, "final"))
    assert found["delay 1, even"].sentence() == "the same order"
    assert found["delay 5, even"].against == (("a", "b"),)


def test_cells_without_runs_stand_in_the_papers_table_only(tmp_path: Path) -> None:
    numbers = {
        ("", "even", "a"): [0.8, 0.9],
        ("", "even", "b"): [],
        ("", "odd", "a"): [],
        ("", "odd", "b"): [],
    }
    papers.write(made(tmp_path, numbers, {"all": {"a": [80.0, 70.0], "b": [60.0, 50.0]}}))
    text, measured = (tmp_path / "result.md").read_text().split("## All measurements")
    assert "| a | 85.00 ± 7.07 | 80.00 | - | 70.00 |\n| b | - | 60.00 | - | 50.00 |" in text
    assert [line.split(" | ")[:3] for line in measured.splitlines() if line.startswith("| ")][2:] == [
        ["| even", "a", "2"]
    ]
    assert "3 of 4 cells have not been run." in measured


@pytest.mark.parametrize(
    ("paper", "pictures"),
    [
        ({"kind": "table"}, []),
        ({"kind": "curves"}, ["figure.png"]),
        ({"kind": "curves", "x": ["gradients", "communications"], "y": ["accuracy", "train_loss"]},
         ["figure-communications.png", "figure-gradients.png"]),
        ({"kind": "lines", "x": ["alpha"], "y": ["accuracy", "wall"]}, ["figure.png"]),
        ({"kind": "bars"}, ["figure.png"]),
        ({"kind": "heatmap"}, ["figure.png"]),
        ({"kind": "heatmaps"}, ["figure.png"]),
        ({"kind": "curves", "panels": ["0.5"]}, ["figure.png"]),
    ],
)  # fmt: skip
def test_every_kind_is_drawn(tmp_path: Path, paper: dict[str, Any], pictures: list[str]) -> None:
    numbers = {(row, column, ""): [0.5, 0.6] for row in ("a", "b") for column in ("0.1", "0.5")}
    numbers[("b", "0.5", "")] = []  # not run yet
    folder = made(tmp_path, numbers, {"a": [[55.0, 1.0], 60.0]}, extras=["contributors"], **paper)
    papers.write(folder)
    assert sorted(path.name for path in folder.glob("*.png")) == pictures
    text = (folder / "result.md").read_text()
    assert "| a | 55.00 ± 7.07 | 55.00 ± 1.00 | 55.00 ± 7.07 | 60.00 |" in text
    assert "Device: GPU; wall time of all runs: 90 s" in text  # six runs of 30 s, two at a time
    assert "3 of 4 cells have all of the seeds 0, 1" in text


@pytest.mark.parametrize(
    ("paper", "pictures"),
    [
        ({"kind": "curves"}, ["figure-by-arrivals.png", "figure-by-ticks.png"]),
        ({"kind": "curves", "panels": ["K = 1"]}, ["figure-by-ticks.png"]),  # no such column by arrivals
        ({"kind": "heatmaps"}, ["figure.png"]),
        ({"kind": "lines", "x": ["K"], "y": ["accuracy", "wall"]}, ["figure.png"]),
    ],
)
def test_variants_are_lines_of_one_picture_per_row_or_maps(
    tmp_path: Path, paper: dict[str, Any], pictures: list[str]
) -> None:
    both = [("by ticks", "K = 1"), ("by ticks", "K = 5"), ("by arrivals", "K = 5")]
    numbers = {(*place, method): [0.5, 0.6] for place in both for method in ("a", "b", "c", "d")}
    folder = made(tmp_path, numbers, **paper)
    papers.write(folder)
    assert sorted(path.name for path in folder.glob("*.png")) == pictures


def test_what_the_paper_says_in_words_stands_beside_ours(tmp_path: Path) -> None:
    folder = made(tmp_path, {("a", "x", ""): [0.5], ("a", "y", ""): [0.6]}, {"a": ["40 to 60", []]})
    papers.write(folder)
    text = (folder / "result.md").read_text()
    assert "| a | 50.00 | 40 to 60 | 60.00 | - |" in text
    assert "ranking" not in text


def test_variants_have_panels_of_their_own(tmp_path: Path) -> None:
    numbers = {
        (row, column, data): [0.5]
        for row in ("a", "b")
        for column in ("1.5", "50.5")
        for data in ("digits", "letters", "signs")
    }
    widths = []
    for apart in (False, True):
        folder = made(tmp_path / str(apart), numbers, kind="lines", x=["ratio"], apart=apart)
        papers.write(folder)
        header = (folder / "figure.png").read_bytes()[:24]
        widths.append(int.from_bytes(header[16:20]))
    inches = [width / 130 for width in widths]
    assert inches[1] - inches[0] == pytest.approx(figures.WIDE, abs=0.02)


def test_trajectories_are_of_quadratics(tmp_path: Path) -> None:
    folder = made(tmp_path, {("a", "", ""): [0.5]}, kind="trajectories")
    (folder / "cell0" / "seed-0" / "config.toml").write_text(
        'label = "a"\nseed = 0\n[scenario.data]\nname = "digits"\n'
    )
    with pytest.raises(LoadError, match="draws the data 'quadratic' only, not 'digits'"):
        papers.write(folder)


def test_a_figure_without_numbers_says_so(tmp_path: Path) -> None:
    folder = made(tmp_path, {("a", "", ""): [0.5]}, kind="curves")
    papers.write(folder)
    assert "the paper gives a figure only, no numbers" in (folder / "result.md").read_text()


def test_what_is_no_quantity_or_axis(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="'speed' is no quantity: choose from best, final"):
        papers.gather(made(tmp_path / "a", {("a", "", ""): [0.5]}, metric="speed"))
    with pytest.raises(LoadError, match="x = 'miles' is no axis: choose from versions"):
        papers.write(made(tmp_path / "b", {("a", "", ""): [0.5]}, kind="curves", x=["miles"]))
    with pytest.raises(LoadError, match=r"plan\.json cannot be read"):
        papers.gather(tmp_path)
