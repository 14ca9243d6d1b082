"""What the commands print and leave behind when all is well."""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TINY

import afield as package
from afield.experiments.codec import dumps
from afield.experiments.config import REGISTRIES, presets
from afield.reports import load

Command = Callable[..., Any]
RACE = TINY | {
    "name": "race",
    "target": 0.5,
    "variants": [{"label": "mixing"}, {"label": "rounds", "strategy": {"name": "fedavg"}}],
}
SMALL = ("--set", "stop.time=1", "--set", "local.epochs=1")
DEFAULT = ("fedasync", "fedbuff", "mr-asyncfl", "ace", "fedavg")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def race(here: Path) -> Path:
    (here / "race.toml").write_text(dumps(RACE | {"seeds": [0, 1]}))
    return here / "race.toml"


# -- run ------------------------------------------------------------------------------------------------


def test_the_default_race(afield: Command, here: Path) -> None:
    ended = afield("run", *SMALL)
    assert (ended.status, ended.err) == (0, "")
    folder = here / "runs" / "default-001"
    assert {path.name for path in folder.iterdir()} == {
        "accuracy.png",
        "compare.csv",
        "experiment.toml",
        *(f"{name}-0" for name in DEFAULT),
    }
    assert all(run.finished for run in load.find([folder]))
    assert (folder / "accuracy.png").read_bytes().startswith(PNG)
    lines = ended.out.splitlines()
    for name in DEFAULT:
        assert any(line.startswith(name) and "100 %" in line for line in lines)  # its progress
        assert any(line.split()[:2] == [name, "1"] for line in lines)  # its row of the table
    assert "Picture runs/default-001/accuracy.png    numbers runs/default-001/compare.csv" in lines
    assert "Try next" in lines
    assert "  afield compare runs/default-001" in lines


def test_what_is_suggested_next_works(afield: Command, here: Path) -> None:
    suggested = [line for line in afield("run", *SMALL).out.splitlines() if line.startswith("  afield ")]
    assert len(suggested) == 5
    for line in suggested[:3]:
        command = line.split("  ")[1].replace("'", "").split()
        assert afield(*command[1:], *SMALL, "--set", "stop.updates=2").status == 0
    for command in ("report", "compare"):
        assert f"  afield {command} runs/default-001" in suggested
        assert afield(command, here / "runs" / "default-001").status == 0


def test_run_folders_are_numbered(afield: Command, here: Path, race: Path) -> None:
    for _ in range(2):
        assert afield("run", race, "--strategy", "fedasync", "--seed", "4").status == 0
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["race-001", "race-002"]
    assert load.load(here / "runs" / "race-002").seed == 4  # a single run is the folder itself


def test_variants_and_seeds_have_folders_of_their_own(afield: Command, here: Path, race: Path) -> None:
    ended = afield("run", race, "--out", "out", "--set", "stop.updates=8")
    assert ended.status == 0
    found = load.find([here / "out"])
    assert [(run.label, run.seed) for run in found] == [
        ("mixing", 0),
        ("mixing", 1),
        ("rounds", 0),
        ("rounds", 1),
    ]
    assert {run.config["stop"]["updates"] for run in found} == {8}
    assert "mixing 1  100 %" in ended.out  # where there are several seeds, progress says which
    assert "Try next" not in ended.out


def test_a_run_repeats_from_its_own_config(afield: Command, here: Path, race: Path) -> None:
    assert afield("run", race, "--strategy", "fedavg", "--seed", "3", "--out", "one").status == 0
    assert afield("run", here / "one" / "config.toml", "--out", "two").status == 0
    configs = [(here / name / "config.toml").read_text() for name in ("one", "two")]
    assert configs[0] == configs[1]
    first, second = load.load(here / "one"), load.load(here / "two")
    assert first.receipts == second.receipts
    assert first.label == second.label == "rounds"


def test_the_environment_has_the_command(afield: Command, here: Path, race: Path) -> None:
    afield("run", race, "--strategy", "asgd", "--seed", "0", "--out", "one")
    told = json.loads((here / "one" / "environment.json").read_text())
    assert told["command"] == [
        "afield",
        "run",
        str(race),
        "--strategy",
        "asgd",
        "--seed",
        "0",
        "--out",
        "one",
    ]


def test_labels_may_hold_anything(afield: Command, here: Path, race: Path) -> None:
    label = "beta = [/b] 50% {x}"
    ended = afield(
        "run", race, "--strategy", "asgd", "--seed", "0", "--set", f"label='{label}'", "--out", "a[/b]"
    )
    assert (ended.status, ended.err) == (0, "")
    assert label in ended.out
    assert "a[/b]/compare.csv" in ended.out
    assert load.load(here / "a[/b]").label == label


def test_a_run_that_ends_early_says_so(afield: Command, race: Path) -> None:
    gone = (
        "scenario.availability.name=dropout",
        "scenario.availability.share=1",
        "scenario.availability.at=2",
    )
    settings = [part for key in gone for part in ("--set", key)]
    ended = afield("run", race, "--strategy", "asgd", "--seed", "0", "--set", "stop.updates=9999", *settings)
    assert ended.status == 0
    assert "asgd: ended early, nobody is left" in ended.out.splitlines()


def test_the_picture_of_the_quadratic(afield: Command, here: Path) -> None:
    ended = afield("run", "fedstale-figure1", "--set", "stop.versions=20", "--out", "out")
    assert (ended.status, ended.err) == (0, "")
    assert (here / "out" / "trajectories.png").read_bytes().startswith(PNG)
    assert "loss" in ended.out
    assert "acc %" not in ended.out


# -- compare --------------------------------------------------------------------------------------------


def test_compare_prints_a_table_and_writes_numbers_and_a_picture(
    afield: Command, here: Path, race: Path
) -> None:
    afield("run", race, "--out", "out")
    ended = afield("compare", "out", "--target", "0.4", "--csv", "new/table.csv", "--png", "new/curves.svg")
    assert (ended.status, ended.err) == (0, "")
    assert "to 40 %" in ended.out
    assert [line.split()[:2] for line in ended.out.splitlines()[-3:-1]] == [["mixing", "2"], ["rounds", "2"]]
    assert "±" in ended.out
    with (here / "new" / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["label"], row["runs"], row["target"]) for row in rows] == [
        ("mixing", "2", "0.4"),
        ("rounds", "2", "0.4"),
    ]
    runs = load.find([here / "out"])
    finals = [run.metrics[-1]["accuracy"] for run in runs if run.label == "mixing"]
    assert float(rows[0]["final_accuracy"]) == pytest.approx(sum(finals) / 2)
    assert (here / "new" / "curves.svg").read_text().startswith("<?xml")
    for axis in ("updates", "versions", "wall"):
        assert afield("compare", "out", "--png", f"{axis}.png", "--x", axis).status == 0
        assert (here / f"{axis}.png").read_bytes().startswith(PNG)


def test_compare_takes_single_runs_and_folders_of_runs(afield: Command, here: Path, race: Path) -> None:
    afield("run", race, "--out", "out")
    afield("run", race, "--strategy", "asgd", "--seed", "7", "--out", "one")
    out = afield("compare", "one", "out/mixing-0", "out").out
    assert [line.split()[:2] for line in out.splitlines()[-4:-1]] == [
        ["asgd", "1"],
        ["mixing", "2"],  # found twice, counted once
        ["rounds", "2"],
    ]


def test_compare_tells_unfinished_runs(afield: Command, here: Path, race: Path) -> None:
    afield("run", race, "--strategy", "asgd", "--seed", "0", "--out", "one")
    (here / "one" / "summary.json").unlink()
    assert "1 of 1 runs unfinished" in afield("compare", "one").out


# -- list, doctor, help ---------------------------------------------------------------------------------


def test_list_has_everything_that_a_config_can_name(afield: Command) -> None:
    ended = afield("list")
    assert (ended.status, ended.err) == (0, "")
    words = ended.out.split()
    for registry in REGISTRIES.values():
        assert all(name in words for name in registry)
    assert all(name in words for name in presets())


def test_list_of_one_kind_has_parameters_and_a_line_each(afield: Command) -> None:
    out = afield("list", "strategies").out
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "size=10" in lines["fedbuff"]
    assert "Mixes each arriving model into the global one" in lines["fedasync"]
    assert "dirichlet" not in out
    out = afield("list", "presets").out
    assert "five algorithms on the same clients" in out


def test_every_line_of_the_list_says_something(afield: Command) -> None:
    for registry in REGISTRIES.values():
        for cls in registry.values():
            doc = (cls.__doc__ or "").partition("\n")[0]
            assert len(doc) > 5, cls
            assert not doc.startswith(f"{cls.__name__}("), cls  # what dataclasses write of their own accord


def test_doctor(afield: Command, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = afield("doctor").out
    assert torch.__version__ in out
    assert "free memory" in out
    assert "not set: only the built-in digits are at hand" in out
    (here / "MNIST" / "raw").mkdir(parents=True)
    monkeypatch.setenv("AFIELD_DATA", str(here))
    out = afield("doctor").out
    rows = {line.strip().partition("  ")[0]: line for line in out.splitlines()}
    assert "not found" not in rows["MNIST"]
    assert "not found" in rows["CIFAR-10"]


def test_version_and_help(afield: Command) -> None:
    assert afield("--version").out == f"afield {package.__version__}\n"
    for arguments in ((), ("run",), ("compare",), ("reproduce",), ("tune",), ("list",), ("doctor",)):
        ended = afield(*arguments, "--help")
        assert (ended.status, ended.err) == (0, "")
        assert "Usage: afield" in ended.out
    assert "Usage: afield" in afield().out  # no command at all: the help


def test_presets_are_documented() -> None:
    for path in presets().values():
        text = path.read_text()
        assert text.startswith("# ")
        assert tomllib.loads(text)["name"] == path.stem
