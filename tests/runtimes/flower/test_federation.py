"""The example of examples/flower, run by Flower's own programs: SuperLink, SuperNodes, `flwr run`; loopback only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", minversion="1.41")

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "flower"))

from loopback import Federation

pytestmark = pytest.mark.slow
PATIENCE = 240.0  # seconds that anything here may take


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation(tmp_path_factory.mktemp("simulation"), nodes=4, simulated=True) as one:
        yield one


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation(tmp_path_factory.mktemp("deployment"), nodes=3) as one:
        yield one


def check(report: dict[str, Any], rounds: int, size: int, clients: int) -> None:
    """Every update once, everyone heard, and a model that has learnt."""
    receipts = report["receipts"]
    assert len({receipt["number"] for receipt in receipts}) == len(receipts) == rounds * size
    assert not any(receipt["refused"] for receipt in receipts)
    assert {receipt["client"] for receipt in receipts} == set(range(clients))
    assert list(report["server"]) == [str(number) for number in range(rounds + 1)]
    first, last = report["server"]["0"]["accuracy"], report["server"][str(rounds)]["accuracy"]
    assert last > first + 0.2


def run(federation: Federation, **config: Any) -> dict[str, Any]:
    path = federation.folder / f"{config['strategy']}.json"
    output = federation.run(timeout=PATIENCE, report=str(path), **config)
    assert path.exists(), output[-4000:]
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def lines(process: subprocess.Popen[str], mark: str) -> str:
    """The run's log up to the first line with this mark."""
    seen = []
    assert process.stdout is not None
    for line in process.stdout:
        seen.append(line)
        if mark in line:
            return "".join(seen)
    raise AssertionError(f"no {mark!r} in " + "".join(seen)[-4000:])


def rest(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    guard = threading.Timer(PATIENCE, process.kill)
    guard.start()
    output = process.stdout.read()
    guard.cancel()
    return output


@pytest.mark.parametrize("strategy", ["fedasync", "fedbuff", "mr-asyncfl", "ace"])
def test_simulation(simulation: Federation, strategy: str) -> None:
    config = {"num_server_rounds": 2, "round_size": 6, "min_nodes": 4, "local_epochs": 5}
    report = run(simulation, strategy=strategy, **config)
    check(report, 2, 6, clients=4)
    assert abs(report["nodes"]["2"]["eval_acc"] - report["server"]["2"]["accuracy"]) < 0.25


@pytest.mark.parametrize("strategy", ["fedasync", "fedbuff"])
def test_deployment(deployment: Federation, strategy: str) -> None:
    config: dict[str, Any] = {"num_server_rounds": 2, "round_size": 3, "min_nodes": 3, "local_epochs": 10}
    config["fraction_evaluate"] = 1.0 if strategy == "fedasync" else 0.0
    report = run(deployment, strategy=strategy, **config)
    check(report, 2, 3, clients=3)
    assert bool(report["nodes"]) == (strategy == "fedasync")


def test_a_serverapp_that_is_killed_and_resumed(deployment: Federation) -> None:
    store = deployment.folder / "store"
    config: dict[str, Any] = {
        "strategy": "mr-asyncfl",
        "num_server_rounds": 2,
        "round_size": 3,
        "min_nodes": 3,
        "store": str(store),
        "local_epochs": 10,
        "fraction_evaluate": 0.0,
    }
    with deployment.begin(**config) as process:
        lines(process, "[ROUND 1/2]")
        os.kill(json.loads((store / "owner.lock").read_text())["pid"], signal.SIGKILL)
        process.kill()
    path = deployment.folder / "resumed.json"
    output = deployment.run(timeout=PATIENCE, report=str(path), **config | {"resume": True})
    (told,) = [line for line in output.splitlines() if "resumed at update" in line]
    before = int(told.split("resumed at update")[1].split(",")[0])
    report = json.loads(path.read_text())
    receipts = report["receipts"]
    assert 3 <= before < 6 and len(receipts) == 6 - before
    # MR.AsyncFL steps once per update: version 6 has every one of them in it
    assert [receipt["version"] for receipt in receipts] == list(range(before + 1, 7))
    assert report["server"]["2"]["accuracy"] > 0.5


def test_a_supernode_that_is_killed_and_another_that_comes(deployment: Federation) -> None:
    config: dict[str, Any] = {"strategy": "ace", "num_server_rounds": 2, "round_size": 4, "min_nodes": 3}
    path = deployment.folder / "ace.json"
    config |= {"deadline": 40.0, "report": str(path), "local_epochs": 10, "fraction_evaluate": 0.0}
    with deployment.begin(**config) as process:
        log = lines(process, "is client 2")
        deployment.kill("node-2")
        deployment.start_node(2, "another")
        output = rest(process)
    nodes = [line.split("node ")[1].split()[0] for line in (log + output).splitlines() if "is client" in line]
    assert len(nodes) == 4 == len(set(nodes)), output[-4000:]  # three, and the one that came
    check(json.loads(path.read_text()), 2, 4, clients=3)
