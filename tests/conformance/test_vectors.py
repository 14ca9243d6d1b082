"""The numeric vectors: each algorithm, in float64, to 1e-9."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from afield.core.server import Server
from afield.core.types import Update
from afield.strategies import STRATEGIES
from afield.strategies.staleness import STALENESS

VECTORS = sorted((Path(__file__).parent / "vectors").glob("*.json"))


def build(vector: dict[str, Any]) -> Any:
    hyper = dict(vector["hyper"])
    if "weight" in hyper:
        weight = dict(hyper["weight"])
        hyper["weight"] = STALENESS[weight.pop("name")](**weight)
    if "p" in hyper:
        hyper["p"] = tuple(hyper["p"])
    return STRATEGIES[vector["algorithm"]](**hyper)


@pytest.mark.parametrize("path", VECTORS, ids=lambda p: p.stem)
def test_vector(path: Path) -> None:
    vector = json.loads(path.read_text())
    server = Server(build(vector), torch.tensor(vector["initial"], dtype=torch.float64), vector["clients"])
    tasks = {client: server.checkout(client, 0.0) for client in range(vector["clients"])}
    for now, step in enumerate(vector["steps"]):
        rounds = "round" in step
        for given in step["round"] if rounds else [step["update"]]:
            client = given["client"]
            task = server.checkout(client, now) if rounds else tasks[client]
            if not rounds:
                assert task.version == given["base_version"]
            model = torch.tensor(given["model"], dtype=torch.float64)
            receipt = server.submit(Update(task, model, None, given["examples"]))
            assert not receipt.refused
            if not rounds:
                tasks[client] = server.checkout(client, now)
        if rounds:
            server.close_round()
        assert server.version == step["version"]
        expected = torch.tensor(step["expected"], dtype=torch.float64)
        torch.testing.assert_close(server.state.params, expected, rtol=0, atol=1e-9)


def test_every_algorithm_with_numbers_is_here() -> None:
    assert len(VECTORS) == 27
