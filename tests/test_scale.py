"""What docs/scale.md rests on: folds need no word between shards, and one region without a way is FedBuff."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from afield.core.server import Server
from afield.core.types import Update
from afield.strategies import STRATEGIES, FedBuff


def _scale() -> ModuleType:
    file = Path(__file__).parents[1] / "benchmarks" / "scale.py"
    spec = importlib.util.spec_from_file_location("scale_benchmark", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


scale = _scale()
ARRIVAL = [
    n for n, s in STRATEGIES.items() if getattr(s(), "pace", "arrival") == "arrival" and n != "fedecho"
]


@pytest.mark.parametrize("name", ARRIVAL)
def test_shards_end_with_the_bits_of_the_whole(name: str) -> None:
    assert scale.same_in_shards(name)


def served(server: Any, updates: int) -> Any:
    """A model per update; two clients always work from what they got before the other's last answer."""
    stream = torch.Generator().manual_seed(0)
    tasks = [server.checkout(0, 0.0), server.checkout(1, 0.0)]
    for number in range(updates):
        task, now = tasks[number % 2], number + 1.0
        model = server.base(task) + torch.randn(5, generator=stream)
        server.submit(Update(task, model, None, 1, arrived=now))
        tasks[number % 2] = server.checkout(number % 2, now)
        yield server.version, server.model()


def test_one_region_without_a_way_is_fedbuff() -> None:
    flat = Server(FedBuff(size=3, lr=0.5), torch.zeros(5), 2)
    one = scale.RegionalServer(scale.RegionalBuff(1, 3, 1, 0.0, 0.5), torch.zeros(5), 2)
    for (version, model), (other, theirs) in zip(served(flat, 20), served(one, 20), strict=True):
        assert version == other
        assert torch.allclose(model, theirs, atol=1e-6)


def test_a_link_delays_both_the_update_and_the_version() -> None:
    # every update is a message, of which one makes a step: sent at 1, 2, 3, ..., at the server 2.5 later, and its
    # version 2.5 after that with the clients: the task of time t starts from what was sent at t - 5, or before
    server = scale.RegionalServer(scale.RegionalBuff(1, 1, 1, 2.5), torch.zeros(5), 2)
    bases = []
    for number, _ in enumerate(served(server, 12)):
        newest = max(server.leases.values(), key=lambda lease: lease.task.number).task
        assert newest.started == number + 1.0
        bases.append(newest.version)
    assert bases == [max(0, time - 5) for time in range(1, 13)]
    # folded 2.5 after it was sent, when the messages sent up to 3 before have been folded: base is that of the task
    assert server.state.staleness[:3] == [0, 1, 2]
