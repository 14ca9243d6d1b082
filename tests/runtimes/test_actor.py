"""An actor without a cluster: what it does with what comes by line."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from afield.core.flat import Layout
from afield.core.types import Task
from afield.runtimes.actor import Actor, Kit, to_bytes
from afield.runtimes.line import Line, call
from afield.runtimes.simulate import threads
from afield.training.alone import alone
from afield.training.choose import Training
from afield.training.local import Local

LOCAL, SEED = Local(batch=5, rate=0.1), 3


class Fussy:
    """Client 1's data is an error of a kind that no other process knows."""

    sizes: Sequence[int] = (10, 10)

    def batch(self, client: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        class UnheardError(Exception):
            pass

        if client == 1:
            raise UnheardError("of me")
        return torch.ones(len(positions), 1, 6, 6) * positions.view(-1, 1, 1, 1), positions % 3


@pytest.fixture
def served() -> Iterator[tuple[nn.Module, Actor, Line, Any]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    with threads(1), ThreadPoolExecutor(1) as other:
        actor = Actor(1)
        _, place = actor.hello(lambda: "127.0.0.1")
        assert place is not None
        line = call(place)
        actor.load("run", Kit(module, Fussy(), LOCAL, SEED, "cross-entropy", "cpu", Training("workers")))
        yield module, actor, line, other.submit(actor.serve)
        line.close()


def message(module: nn.Module, client: int) -> bytes:
    base = to_bytes(Layout.of(module).flatten(module)).tobytes()
    return pickle.dumps(("run", [Task(4, client, 0, 0, 0.0)], [(0, None)], base))


def test_what_comes_by_line_is_trained_as_in_one_process(served: Any) -> None:
    module, actor, line, serving = served
    for _ in range(2):
        line.send(message(module, 0))
    [first], [second] = pickle.loads(line.receive()), pickle.loads(line.receive())
    base = Layout.of(module).flatten(module)
    [expected] = alone(module, Fussy(), LOCAL, SEED).train([Task(4, 0, 0, 0, 0.0)], [base], [None])
    for held, examples, _, _, metrics in (first, second):
        assert bytes(held) == to_bytes(expected.model).tobytes()
        assert (examples, metrics) == (expected.examples, dict(expected.metrics))
    line.send(b"")  # it leaves the line, and comes back to it
    assert serving.result() is None
    with ThreadPoolExecutor(1) as other:
        serving = other.submit(actor.serve)
        line.send(message(module, 0))
        assert bytes(pickle.loads(line.receive())[0][0]) == bytes(first[0])
        line.send(b"")
        serving.result()


def test_an_error_is_an_answer(served: Any) -> None:
    module, _, line, _ = served
    for client in (1, 0):
        line.send(message(module, client))
    [error], [answer] = pickle.loads(line.receive()), pickle.loads(line.receive())
    assert str(error) == "training failed (client 1, task 4): of me"
    assert answer[1] == 10


def test_a_run_that_is_over_is_forgotten_and_a_task_of_it_ends_the_line(served: Any) -> None:
    module, _, line, serving = served
    line.send(pickle.dumps(("run",)))
    line.send(message(module, 0))
    with pytest.raises(ConnectionError):
        line.receive()
    assert isinstance(serving.exception(), KeyError)
