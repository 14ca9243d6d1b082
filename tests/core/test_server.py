"""The door: what is refused leaves the state bitwise unchanged, what is accepted counts once."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError, astuple, replace
from typing import Any

import pytest
import torch
from playback import BATTERY, SIZE, frozen, play, same

from afield.core.errors import InputError
from afield.core.server import REFUSALS, Server
from afield.core.types import LocalResult, Receipt, Task, Update
from afield.strategies import FedAsync, FedBuff, FedEcho, Scaffold


def good(server: Server, task: Task) -> Update:
    return Update(task, server.base(task) + 1.0, None, examples=3, arrived=1.0)


def spoilt(update: Update, how: str, client: int) -> Update:
    task = update.task
    model = update.model.clone()
    if how == "not-finite":
        model[7] = math.nan
    elif how == "not-finite (inf)":
        model[-1] = -math.inf
    elif how == "wrong-length":
        model = model[:-1]
    elif how == "wrong-type":
        model = model.double()
    elif how == "no-examples":
        return replace(update, examples=0)
    elif how == "no-steps":
        return replace(update, steps=0)
    elif how == "no-steps (rate)":
        return replace(update, rate=math.nan)
    elif how == "unknown-client":
        task = replace(task, client=client)
    elif how == "never-leased":
        task = replace(task, number=task.number + 1000)
    elif how == "never-leased (version)":
        task = replace(task, version=task.version + 1)
    elif how == "never-leased (another's)":
        task = replace(task, client=(task.client + 1) % client)
    return replace(update, task=task, model=model)


WAYS = [
    "not-finite",
    "not-finite (inf)",
    "wrong-length",
    "wrong-type",
    "no-examples",
    "no-steps",
    "no-steps (rate)",
    "unknown-client",
    "never-leased",
    "never-leased (version)",
    "never-leased (another's)",
]


@pytest.mark.parametrize("name", BATTERY)
def test_a_refusal_changes_nothing(name: str) -> None:
    player = play(BATTERY[name])
    player.run(7)
    server = player.server
    task = player.tasks.get(0) or server.checkout(0, 9.0)
    before = frozen(player)
    for how in WAYS:
        receipt = server.submit(spoilt(good(server, task), how, server.clients))
        assert receipt.refused == how.partition(" ")[0]
        assert (receipt.stepped, receipt.weight, receipt.version) == (False, 0.0, server.version)
        assert same(server.state, before.server.state)
        assert task.number in server.leases  # the client may try again
    assert server.submit(good(server, task)).refused == ""


def test_an_update_counts_once_however_often_it_is_sent() -> None:
    server = Server(FedBuff(size=2), torch.zeros(SIZE), 3)
    task = server.checkout(1, 0.0)
    update = good(server, task)
    assert server.submit(update).refused == ""
    state = play_state(server)
    for _ in range(3):
        assert server.submit(update).refused == "closed"
    assert torch.equal(server.state.total, state)  # type: ignore[attr-defined]
    assert server.state.held == 1  # type: ignore[attr-defined]


def play_state(server: Server) -> Any:
    return server.state.total.clone()  # type: ignore[attr-defined]


def test_a_cancelled_task_is_closed() -> None:
    server = Server(FedBuff(), torch.zeros(4), 2)
    task = server.checkout(0, 0.0)
    update = good(server, task)
    server.cancel(task)
    assert server.submit(update).refused == "closed"
    assert not server.versions.models


def test_too_stale_is_refused_by_name() -> None:
    server = Server(FedBuff(size=1), torch.zeros(4), 2, max_staleness=1)
    slow = server.checkout(0, 0.0)
    for _ in range(2):
        server.submit(good(server, server.checkout(1, 0.0)))
    receipt = server.submit(good(server, slow))
    assert (receipt.refused, receipt.staleness) == ("too-stale", 2)
    assert server.version == 2


def test_every_reason_has_an_explanation() -> None:
    assert {how.partition(" ")[0] for how in WAYS} | {"closed", "too-stale"} == set(REFUSALS)


def test_versions_are_shared_counted_and_recycled() -> None:
    server = Server(FedBuff(size=1), torch.zeros(4), 3)
    first, second = server.checkout(0, 0.0), server.checkout(1, 0.0)
    assert server.base(first) is server.base(second)
    buffer = server.base(first)
    server.submit(good(server, first))
    assert torch.equal(server.base(second), torch.zeros(4))
    third = server.checkout(0, 0.0)
    assert torch.equal(server.base(third), torch.ones(4))
    server.submit(good(server, second))
    assert server.versions.spare[0] is buffer
    server.checkout(2, 0.0)
    assert not server.versions.spare
    with pytest.raises(InputError, match="version 0 is not held: the newest is 2, leased are 1, 2"):
        server.checkout(2, 0.0, version=0)
    assert server.checkout(2, 0.0, version=1).version == 1


def test_a_trained_task_gives_its_base_back_where_nobody_reads_it_again() -> None:
    server = Server(FedAsync(alpha=0.5), torch.zeros(4), 3)
    first, second = server.checkout(0, 0.0), server.checkout(1, 0.0)
    update, late = good(server, first), good(server, second)
    for _ in range(2):  # telling it twice gives it back once
        server.trained(first)
    assert torch.equal(server.base(second), torch.zeros(4))
    server.trained(second)
    assert not server.versions.models
    with pytest.raises(InputError, match="task 0 was trained: its base has been given back"):
        server.base(first)
    assert server.submit(update).refused == ""
    assert torch.equal(server.model(), torch.full((4,), 0.5))
    server.cancel(second)
    assert server.submit(late).refused == "closed"
    assert not server.leases and not server.versions.leases


def test_a_trained_task_keeps_a_base_that_the_strategy_reads() -> None:
    server = Server(FedBuff(size=1), torch.zeros(4), 2)
    task = server.checkout(0, 0.0)
    server.trained(task)
    assert torch.equal(server.base(task), torch.zeros(4))
    server.submit(good(server, task))
    assert torch.equal(server.model(), torch.ones(4))
    assert not server.versions.models


def test_counts_and_numbers_rise() -> None:
    server = Server(FedBuff(), torch.zeros(4), 3)
    tasks = [server.checkout(client, 0.0) for client in (2, 0, 2, 2)]
    assert [(t.number, t.client, t.count) for t in tasks] == [(0, 2, 0), (1, 0, 0), (2, 2, 1), (3, 2, 2)]
    with pytest.raises(InputError, match=r"client 3 is unknown: clients are 0 \.\. 2"):
        server.checkout(3, 0.0)


def test_a_correction_is_leased_with_the_task() -> None:
    """The correction a client was given stays what it was, whatever arrives before its update."""
    player = play(Scaffold())
    player.run(6)
    server = player.server
    task = server.checkout(4, 0.0)
    leased = server.correction(task)
    assert leased is not None
    before = leased.clone()
    player.beats = 6
    player.run(9)
    assert torch.equal(leased, before)
    now = server.strategy.correction(server.state, 4)  # type: ignore[attr-defined]
    assert not torch.equal(now, before)


def test_what_moves_is_frozen_however_it_was_made() -> None:
    """Tasks, updates and receipts are filled as mutable twins: what comes out must be the real thing."""
    server = Server(FedBuff(), torch.zeros(4), 2)
    task = server.checkout(1, 2.5)
    update = LocalResult(torch.ones(4), 3, 2, 0.1, {"loss": 1.5}, finite=True).answer(task, 4.0)
    receipt = server.submit(update)
    assert task == Task(0, 1, 0, 0, 2.5)
    made = Update(task, update.model, None, 3, 2, 0.1, 4.0, {"loss": 1.5}, finite=True)
    assert (type(update), repr(update)) == (Update, repr(made))
    assert receipt == Receipt(0, 1, 0, 2.5, 4.0, 3, 16, 0, 1.0, False, 0)
    for thing, name in ((task, "client"), (update, "examples"), (receipt, "version")):
        with pytest.raises(FrozenInstanceError):
            setattr(thing, name, 9)
        assert getattr(replace(thing, **{name: 9}), name) == 9
    assert pickle.loads(pickle.dumps(receipt)) == receipt
    assert hash(receipt) == hash(Receipt(*astuple(receipt)))


@pytest.mark.parametrize("parameters", [4, 3])
def test_a_copy_of_the_model_is_whole_and_ones_own(parameters: int) -> None:
    initial = torch.arange(4.0)
    server = Server(FedBuff(size=1), initial, 2, parameters=parameters)
    fresh, buffer = server.model(), torch.full((4,), math.nan)
    assert server.model(buffer) is buffer
    for copy in (fresh, buffer):
        assert torch.equal(copy, initial)
        copy.zero_()
    assert torch.equal(server.model(), initial)


def test_journal_comes_before_the_fold_and_never_sees_what_is_refused() -> None:
    class Notes:
        def __init__(self) -> None:
            self.rows: list[tuple[int, int]] = []

        def append(self, update: Update) -> None:
            self.rows.append((update.task.number, server.state.held))  # type: ignore[attr-defined]

    notes = Notes()
    server = Server(FedBuff(size=10), torch.zeros(4), 2, journal=notes)
    for number in range(3):
        task = server.checkout(0, 0.0)
        server.submit(spoilt(good(server, task), "not-finite (inf)", 2))
        server.submit(good(server, task))
        assert notes.rows == [(n, n) for n in range(number + 1)]


def test_distilling_needs_unlabelled_data() -> None:
    with pytest.raises(InputError, match="unlabelled"):
        Server(FedEcho(), torch.zeros(4), 2)
