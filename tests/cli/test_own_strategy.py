"""A strategy of a user's own, in a file outside the package: by the command and from Python."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import TINY
from torch import nn
from torch.utils.data import TensorDataset

import afield as package
from afield.experiments.codec import dumps
from afield.experiments.config import config, load_class
from afield.experiments.run import prepare
from afield.reports import load

Command = Callable[..., Any]
# Fifteen lines, types left out: all that a rule with a memory of its own needs.
MINE = '''
import torch
from dataclasses import dataclass
from afield import Receipt, ServerState

@dataclass(slots=True, kw_only=True)
class MineState(ServerState):
    speed: torch.Tensor

@dataclass(frozen=True)
class Mine:
    """Server momentum: differences push a speed, the speed moves the model."""
    lr: float = 0.3
    beta: float = 0.5
    uses_base = True
    whole = False

    def init(self, params, clients):
        return MineState(params=params, speed=torch.zeros_like(params))

    def receive(self, state, update):
        state.speed.mul_(self.beta).add_(update.model).sub_(update.base)
        state.params.add_(state.speed, alpha=self.lr)
        state.version += 1
        staleness = state.version - 1 - update.task.version
        return Receipt.of(update, staleness, self.lr, True, state.version)
'''


@pytest.fixture
def mine(here: Path) -> str:
    (here / "my.py").write_text(MINE)
    (here / "tiny.toml").write_text(dumps(TINY))
    return "my.py:Mine"


def test_it_runs_by_the_command(afield: Command, here: Path, mine: str) -> None:
    ended = afield("run", "tiny.toml", "--strategy", mine, "--set", "strategy.beta=0.8", "--out", "out")
    assert (ended.status, ended.err) == (0, "")
    found = load.load(here / "out")
    assert found.finished
    assert found.label == "Mine"
    assert found.receipts.num_rows == 20
    assert found.metrics[-1]["accuracy"] > found.metrics[0]["accuracy"]


def test_its_config_names_it_again(afield: Command, here: Path, mine: str) -> None:
    afield("run", "tiny.toml", "--strategy", mine, "--set", "strategy.beta=0.8", "--out", "out")
    table = tomllib.loads((here / "out" / "config.toml").read_text())
    assert table["strategy"] == {"name": mine, "lr": 0.3, "beta": 0.8}
    again = config(table)
    assert again.strategy == load_class(mine)(beta=0.8)
    assert tomllib.loads(again.toml()) == table
    # and the run can be repeated from there, to the bit
    assert afield("run", "out/config.toml", "--out", "again").status == 0
    first, second = (load_file(here / place / "model.safetensors") for place in ("out", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_it_is_a_variant_like_any_other(afield: Command, here: Path, mine: str) -> None:
    variants = [
        {"label": "mine", "strategy": {"name": mine}},
        {"label": "asgd", "strategy": {"name": "asgd"}},
    ]
    (here / "race.toml").write_text(dumps(TINY | {"variants": variants}))
    assert afield("run", "race.toml", "--out", "out").status == 0
    runs = {
        run.label: run.receipts.select(["client", "started", "arrived"]) for run in load.find([here / "out"])
    }
    assert runs["mine"] == runs["asgd"]  # the identical arrival trace


def test_without_momentum_it_is_asgd(mine: str) -> None:
    """beta = 0 leaves w <- w + lr (model - base), which is what asgd does."""
    ends = []
    for strategy in ({"name": mine, "beta": 0.0}, {"name": "asgd", "lr": 0.3}):
        simulator = prepare(config(TINY | {"strategy": strategy})).simulator
        list(simulator.rows())
        ends.append(simulator.server.model())
    assert torch.allclose(*ends, atol=1e-6)


def test_it_runs_from_python(mine: str) -> None:
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    clients = [TensorDataset(inputs[i::4], inputs[i::4].argmax(1)) for i in range(4)]
    model = nn.Linear(3, 3)
    before = model.weight.clone()
    strategy = load_class(mine)()
    result = package.simulate(
        strategy, model, clients, test=(inputs, inputs.argmax(1)), updates=200, local=package.Local(rate=0.5)
    )
    assert len(result.receipts) == 200
    assert result.accuracy is not None
    assert result.accuracy > 0.9
    assert torch.equal(model.weight, before)


def test_the_file_may_be_anywhere(afield: Command, here: Path, mine: str, tmp_path: Path) -> None:
    away = tmp_path / "some where" / "else.py"
    away.parent.mkdir()
    shutil.move(here / "my.py", away)
    assert afield("run", "tiny.toml", "--strategy", f"{away}:Mine", "--out", "out").status == 0
    table = tomllib.loads((here / "out" / "config.toml").read_text())
    assert table["strategy"]["name"] == f"{away}:Mine"
