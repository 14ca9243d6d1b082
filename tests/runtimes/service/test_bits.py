"""The same config, the same order of arrivals: a simulation and a live service end with the same bits."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from served import Live, live, until
from tiny import tiny

from afield.core.errors import InputError
from afield.core.types import Receipt
from afield.experiments.join import Train, by_config
from afield.experiments.run import prepare
from afield.runtimes.rows import Measurement
from afield.runtimes.service.client import RemoteTask

ALIKE = [column.name for column in fields(Receipt) if column.name not in ("number", "started", "arrived")]
FREE = ["fedasync", "fedbuff", "mr-asyncfl", "twafl", "ca2fl", "fadas", "ace", "fedac", "delay-adaptive-asgd"]


def simulated(name: str, **changes: Any) -> tuple[Any, list[Receipt], torch.Tensor]:
    chosen = tiny(name, training={"method": "loop"}, stop={"updates": 14}, **changes)
    prepared = prepare(chosen)
    rows = [row for row in prepared.simulator.rows() if not isinstance(row, Measurement)]
    return chosen, rows, prepared.simulator.server.model()


def answer(task: RemoteTask, train: Train) -> Receipt:
    result = train(task)
    return task.submit(
        result.model, examples=result.examples, steps=result.steps, rate=result.rate, metrics=result.metrics
    )


def replayed(server: Live, rows: list[Receipt], train: Train) -> list[Receipt]:
    """The same tasks and answers, in the simulation's order, each client over its own connection."""
    clients = {number: server.client(number) for number in range(5)}
    waiting = sorted(rows, key=lambda row: row.number)
    out: dict[int, RemoteTask] = {}
    given, version = [], 0
    for row in rows:
        while waiting and waiting[0].base == version and waiting[0].client not in out:
            first = waiting.pop(0)
            task = clients[first.client].next_task()
            assert task is not None and task.version == version
            out[first.client] = task
        given.append(answer(out.pop(row.client), train))
        version = given[-1].version
    return given


def check(server: Live, rows: list[Receipt], given: list[Receipt], model: torch.Tensor) -> None:
    wanted = [[getattr(row, name) for name in ALIKE] for row in rows]
    assert [[getattr(row, name) for name in ALIKE] for row in given] == wanted
    version, vector = server.client().model("latest")
    assert version == rows[-1].version
    assert torch.equal(vector, model)


@pytest.mark.parametrize("name", FREE)
def test_updates_used_as_they_arrive(name: str, tmp_path: Path) -> None:
    chosen, rows, model = simulated(name)
    assert len(rows) == 14
    with live(chosen, tmp_path / "run") as server:
        given = replayed(server, rows, by_config(server.client().about()["config"]))
        check(server, rows, given, model)


def test_a_difference_that_the_client_holds(tmp_path: Path) -> None:
    """ACE, algorithm a.5: the client keeps its previous delta and commits it on the receipt."""
    chosen, rows, model = simulated("ace", strategy={"name": "ace", "held": "client"})
    with live(chosen, tmp_path / "run") as server:
        given = replayed(server, rows, by_config(server.client().about()["config"]))
        check(server, rows, given, model)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedstale"])
def test_rounds(name: str, tmp_path: Path) -> None:
    chosen, rows, model = simulated(name, scenario={"rounds": {"name": "cohort", "size": 3, "idle": 1000.0}})
    whole = len(rows) // 3 * 3  # the simulation ends in the middle of a round
    with live(chosen, tmp_path / "run") as server:
        train = by_config(server.client().about()["config"])
        got: dict[int, RemoteTask] = {}

        def ask(number: int) -> None:
            client, task = server.client(number), None
            with contextlib.suppress(InputError):  # the end comes while it waits
                while task is None:
                    task = client.next_task()
                got[number] = task

        given = []
        asking: dict[int, threading.Thread] = {}
        for start in range(0, whole, 3):
            group = rows[start : start + 3]
            for number in range(5):  # everyone asks, and goes on asking until it is its turn
                if number not in asking or not asking[number].is_alive():
                    asking[number] = threading.Thread(target=ask, args=(number,), daemon=True)
                    asking[number].start()
            until(lambda: all(row.client in got for row in group))  # noqa: B023
            assert len(got) == 3
            given += [answer(got.pop(row.client), train) for row in group]
        wanted = [[getattr(row, name) for name in ALIKE] for row in rows[:whole]]
        assert [[getattr(row, name) for name in ALIKE] for row in given] == wanted
        until(lambda: server.client().status()["version"] == whole // 3)
        replay = prepare(chosen).simulator
        replay.stop = type(replay.stop)(versions=whole // 3)
        for _ in replay.rows():
            pass
        assert replay.server.version == whole // 3
        assert torch.equal(server.client().model("latest")[1], replay.server.model())
    assert len(model) == len(replay.server.model())
