"""What examples/ holds and which commands the README names, run as they stand."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from afield.cli import main
from afield.experiments.config import Config, experiment, load_class, presets, read
from afield.experiments.run import prepare
from afield.reports import load
from afield.runtimes.rows import Measurement
from afield.strategies import FedAsync

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def test_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "one_file.py"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["FedBuff", "FedAvg"]
    ends = [float(line.split()[-1].rstrip("%")) for line in lines]
    assert ends[0] > 90
    assert ends[0] > ends[1]


def test_own_strategy_learns() -> None:
    name = f"{EXAMPLES / 'own_strategy.py'}:Clipped"
    settings = ["stop.time=8", "measure.time=8"]
    (chosen,) = experiment(read(presets()["default"]), strategy=name, settings=settings).runs
    rows = list(prepare(chosen).simulator.rows())
    assert isinstance(rows[-1], Measurement)
    assert rows[-1].values["accuracy"] > 0.6


def test_own_strategy_is_fedasync_until_the_cap_bites() -> None:
    ends = {}
    clipped = load_class(f"{EXAMPLES / 'own_strategy.py'}:Clipped")
    table = read(EXAMPLES / "compare.toml") | {"stop": {"updates": 20}}
    (shared,) = experiment(table, strategy="fedasync", seed=0, settings=["server.max_staleness=999"]).runs
    for key, strategy in {
        "fedasync": FedAsync(alpha=0.6),
        "wide": clipped(cap=1e9),
        "narrow": clipped(cap=0.1),
    }.items():
        chosen = Config(strategy=strategy, scenario=shared.scenario, stop=shared.stop)
        simulator = prepare(chosen).simulator
        start = simulator.server.model()
        list(simulator.rows())
        ends[key] = simulator.server.model() - start
    assert torch.allclose(ends["wide"], ends["fedasync"], atol=1e-5)
    assert (
        ends["narrow"].norm() <= 20 * 0.6 * 0.1 * 1.0001
    )  # alpha * cap is the most that one update moves it
    assert ends["narrow"].norm() < ends["wide"].norm()


def test_compare_toml_says_what_every_section_is_for() -> None:
    lines = (EXAMPLES / "compare.toml").read_text().splitlines()
    sections = [number for number, line in enumerate(lines) if line.startswith("[")]
    described = [lines[number] for number in sections if lines[number - 1].startswith("# ")]
    assert {line.strip("[]").partition(".")[0] for line in described} == {
        *("model", "local", "scenario", "server", "measure", "stop", "runtime", "variants"),
    }
    assert len(described) == len({lines[number] for number in sections})


def test_compare_toml_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("--set", "stop.time=3", "--set", "seeds=[0,1]")
    monkeypatch.setattr(
        "sys.argv",
        ["afield", "run", str(EXAMPLES / "compare.toml"), "--out", str(tmp_path / "out"), *settings],
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    found = load.find([tmp_path / "out"])
    assert {run.label for run in found} == {"fedasync", "fedbuff 5", "fedbuff 10", "fedavg"}
    assert len(found) == 8
    assert all(run.finished for run in found)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl, which makes the certificates")
def test_the_service_with_a_slow_client_and_one_that_is_killed(tmp_path: Path) -> None:
    """Real processes and TLS; what each did is read from the run's own folder."""
    pytest.importorskip("starlette")
    command = [sys.executable, str(EXAMPLES / "service" / "run.py"), "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*command, "--updates", "40"], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    *told, last = done.stdout.splitlines()
    found = json.loads(last)
    usual, slow, killed = found["updates"]
    assert killed == 2 and usual > slow > 1 and usual + slow + killed >= 40
    assert found["expired"] == [found["lost"]]  # just the task that it died over
    assert 2.0 < found["after"] < 30  # a lease of 3 s from the last heartbeat, which is up to a second old
    assert found["accuracy"] > 0.85 and any(line.startswith("promoted: version ") for line in told)
    assert (found["server"], found["alive"]) == (0, [False] * 4)
    (run,) = load.find([tmp_path / "out" / "run"])
    assert run.series("accuracy")[-1]["accuracy"] > 0.85
    assert not list((tmp_path / "out" / "run").rglob("*.token"))


def test_the_commands_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^afield .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    live = [line for line in commands if line.split()[1] in ("serve", "token", "join", "status")]
    deploy = (ROOT / "docs" / "howto" / "deploy.md").read_text().splitlines()
    assert len(live) == 4 and set(live) <= set(deploy)  # where tests/docs runs them
    commands = [line for line in commands if line not in live]
    assert len(commands) >= 6
    for line in commands:
        arguments = shlex.split(line, comments=True)
        small = ["--set", "stop.updates=3"] if arguments[1] == "run" else []
        monkeypatch.setattr("sys.argv", arguments + small)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0, line
        assert capsys.readouterr().err == "", line
