"""Every preset of a paper that comes with afield: at all three scales, and run at the smallest."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from afield.core.types import Receipt
from afield.experiments.paper import SCALES, load_preset, papers
from afield.experiments.reproduce import reproduce
from afield.experiments.run import prepare
from afield.reports.quantities import QUANTITIES

PAPERS = sorted(papers())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", PAPERS)
def test_it_decodes(name: str, scale: str) -> None:
    preset = load_preset(name)
    assert preset.name == name
    assert preset.paper.cost
    assert {preset.paper.metric, *preset.paper.extras} <= set(QUANTITIES)
    seeds = preset.seeds(scale)
    for cell in preset.cells(scale):
        assert [run.seed for run in cell.configs(seeds[:1])] == [seeds[0]]
    preset.sweep(scale)


@pytest.mark.parametrize("name", PAPERS)
def test_a_grid_names_keys_of_its_runs(name: str) -> None:
    preset = load_preset(name)
    cell = preset.cells()[0]
    for key, values in preset.grid.items():
        for value in values:
            (run,) = cell.configs([0], [f"{key}={value}"])
            part, _, last = key.partition(".")
            assert run != cell.configs([0])[0] or cell.table[part][last] == value


@pytest.mark.parametrize("method", ["ACE", "FedBuff", "Delay-Adaptive ASGD"])
def test_by_arrivals_aces_delays_only_scale_the_clock(method: str) -> None:
    """Why ace-table-2 leaves out (c) and (d) there: everyone draws from one exponential distribution."""
    preset = load_preset("ace-table-2")
    (cell,) = preset.cells("smoke", ["arrivals", "(a) K = 1", method])
    logs = []
    for mean in (5, 30):
        (run,) = cell.configs([0], [f"scenario.delay.mean={mean}", "stop.versions=40"])
        rows = [row for row in prepare(run).simulator.rows() if isinstance(row, Receipt)]
        logs.append([(row.client, row.base, row.version) for row in rows])
    assert logs[0] == logs[1] and len(logs[0]) >= 40


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPERS)
def test_its_smoke_runs_offline(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AFIELD_DATA", raising=False)
    preset = load_preset(name)
    folder = reproduce(name, scale="smoke", out=tmp_path / "out")
    text = (folder / "result.md").read_text()
    assert preset.paper.what in text
    for line in (*preset.paper.open, *preset.paper.notes):
        assert f"- {line}" in text
    with (folder / "result.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["row"], row["column"], row["variant"]) for row in rows] == [
        (cell.row, cell.column, cell.variant) for cell in preset.cells("smoke")
    ]
    assert all(int(row["seeds"]) == len(preset.seeds("smoke")) for row in rows)
    assert bool(list(folder.glob("*.png"))) == (preset.paper.kind != "table")
