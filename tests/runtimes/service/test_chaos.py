"""Three minutes of chaos and twenty kills: nothing acknowledged is lost, nothing counts twice, the bits are right."""

from __future__ import annotations

import socket
from dataclasses import asdict
from pathlib import Path

import pytest
from chaos import rampage, replayed, same

from afield.experiments.config import experiment, presets, read
from afield.experiments.serve import _server
from afield.store.live import Durable

NET = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 10))
"""
STRATEGIES = [
    ("mr-asyncfl", [], 30.0, 3),
    pytest.param("fedbuff", ["strategy.size=3"], 180.0, 20),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings", "seconds", "kills"), STRATEGIES)
def test_chaos(name: str, settings: list[str], seconds: float, kills: int, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(NET)
    net, settings = f"{tmp_path / 'my.py'}:Net", [*settings, "scenario.clients=12"]
    arguments = ["--model", net, "--keep", "all", "--lease", "2", "--strategy", name, "--rate", "1000"]
    for setting in settings:
        arguments += ["--set", setting]
    mob = rampage(tmp_path / "run", arguments, free_port(), clients=12, kills=kills, seconds=seconds, seed=7)
    assert mob.differing == []  # who asked twice was told the same

    chosen = experiment(read(presets()["default"]), strategy=name, settings=settings).runs[0]
    offline, receipts = replayed(_server(chosen, net)[0], tmp_path / "run" / "store")
    lost = [number for number in mob.receipts if number not in receipts]
    known = {number: told for number, told in mob.receipts.items() if number in receipts}
    wrong = [number for number, told in known.items() if asdict(receipts[number]) != told]
    with Durable(
        _server(chosen, net)[0], tmp_path / "run" / "store", about={"model": net}, keep="all"
    ) as door:
        equal = same(door.server.model(), offline.model())
        twice = sum(door.accepted.values()) - len(receipts)
    print(f"{name}: {kills} kills in {seconds:.0f} s, {len(receipts)} updates folded, {mob.counts}")
    print(f"{len(mob.receipts)} acknowledged, {len(lost)} lost, {twice} counted twice, bits equal: {equal}")
    assert (lost, wrong, twice, equal) == ([], [], 0, True)
    assert len(receipts) > 10 * kills
