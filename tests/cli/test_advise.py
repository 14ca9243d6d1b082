"""`afield advise`, and the pictures of diagnosed runs."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import TINY

from afield.experiments import probe
from afield.experiments.codec import dumps, merge
from afield.reports import load
from afield.reports.diagnosis import FLOOR, _effective, _term

Command = Callable[..., Any]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "EVENTS", 2000)


def test_advice_on_the_screen_ends_in_a_table_to_paste(afield: Command) -> None:
    ended = afield("advise", "default", "--set", "scenario.data.held_out=0")
    assert (ended.status, ended.err) == (0, "")
    for words in ("p_avg / p_min", "Recommended: aced", "[strategy]", "Worth a try", "Not known", "tau_algo"):
        assert words in ended.out
    snippet = ended.out.partition("[strategy]\n")[2].partition("\n\n")[0]
    assert tomllib.loads(snippet)["name"] == "aced"


def test_advice_for_machines(afield: Command) -> None:
    ended = afield("advise", "--json", "--strategy", "fedavg")
    told = json.loads(ended.out)
    assert told["facts"]["pace"] == "round"
    assert told["facts"]["participation"] == 1.0
    first = told["recommended"][0]
    assert first["strategy"] == {"name": "fedvarp", "p": "known"}
    assert tomllib.loads(first["toml"])["strategy"] == first["strategy"]
    assert told["unknown"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing.toml",), "nothing.toml is neither a file nor a preset"),
        (("default", "--set", "scenario.clients=0"), "scenario.clients = 0 is outside"),
        (("default", "--strategy", "fedbluff"), "did you mean 'fedbuff'?"),
        (("default", "--set", "scenario.clients=100000"), "clients = 100000"),
    ],
)
def test_bad_input_is_one_line(afield: Command, arguments: tuple[str, ...], message: str) -> None:
    ended = afield("advise", *arguments)
    assert ended.status == 2
    assert message in ended.err
    assert ended.err.count("\n") == 1


@pytest.fixture
def diagnosed(afield: Command, here: Path) -> Path:
    variants = [
        {"strategy": {"name": "ace"}},
        {"strategy": {"name": "asgd"}},
        {"strategy": {"name": "fedasync"}},
    ]
    table = merge(TINY, {"measure": {"diagnose": True}, "variants": variants, "seeds": [0, 1]})
    table = {key: value for key, value in table.items() if key not in ("label", "strategy")}
    (here / "race.toml").write_text(dumps(table))
    ended = afield("run", "race.toml", "--out", "race", "--set", "local.steps=1")
    assert (ended.status, ended.err) == (0, "")
    return here / "race"


def test_diagnosed_runs_are_drawn(afield: Command, here: Path, diagnosed: Path) -> None:
    assert (diagnosed / "diagnosis.png").read_bytes().startswith(PNG)
    ended = afield("compare", diagnosed, "--diagnose", "new/all.svg", "--x", "versions")
    assert (ended.status, ended.err) == (0, "")
    text = (here / "new" / "all.svg").read_text()
    for words in ("noise: |u", "drift: mean", "effective number of clients", "slow half", "fedasync", "ace"):
        assert words in text


def test_what_is_drawn_is_what_was_recorded(diagnosed: Path) -> None:
    runs = {(run.label, run.seed): run for run in load.find([diagnosed])}
    ace, mixing = runs["ace", 0], runs["fedasync", 0]
    assert {value for _, value in _term(ace, "version", "bias")} == {FLOOR}
    assert min(value for _, value in _term(runs["asgd", 0], "version", "bias")) > 1e-3
    assert _term(mixing, "version", "bias") == []
    assert [value for _, value in _effective(ace, "version")] == pytest.approx([5.0] * 4)  # all five, equally
    last = mixing.diagnostics[-1]["share"]
    expected = sum(last) ** 2 / sum(share * share for share in last)
    assert _effective(mixing, "time")[-1][1] == pytest.approx(expected)


def test_runs_that_were_not_diagnosed(afield: Command, here: Path) -> None:
    (here / "plain.toml").write_text(dumps(TINY))
    afield("run", "plain.toml", "--out", "plain")
    assert not (here / "plain" / "diagnosis.png").exists()
    ended = afield("compare", "plain", "--diagnose", "a.png")
    assert ended.status == 2
    assert "none of the runs was diagnosed: run them again with --set measure.diagnose=true" in ended.err
    assert afield("compare", "plain", "--diagnose", "a.txt").status == 2
