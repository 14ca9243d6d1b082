"""What clients remember: replies and updates are lost, processes end, and the bits are right after all."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from served import Live, live
from tiny import tiny

from afield.core.errors import InputError
from afield.core.types import Receipt
from afield.experiments.join import by_config
from afield.experiments.run import prepare
from afield.runtimes.rows import Measurement
from afield.runtimes.service.client import Client, RemoteTask
from afield.runtimes.service.memory import Memory


class Lossy:
    """A wire to the service that loses what it is told to: updates ("update"), or their replies ("reply")."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self.to, self.loses, self.lost = (host, int(port)), "", 0
        self.once = True
        self.door = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.door.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    def lose(self, what: str, once: bool) -> None:
        self.loses, self.once = what, once

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.door.accept()
                threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError), near, socket.create_connection(self.to) as far:
            cut = threading.Event()  # this connection's replies are lost
            threading.Thread(target=self._back, args=(far, near, cut), daemon=True).start()
            while data := near.recv(1 << 16):
                if data.startswith(b"PUT ") and (loses := self.loses):
                    self.lost += 1
                    self.loses = "" if self.once else loses
                    if loses == "update":
                        break
                    cut.set()
                far.sendall(data)
            if not cut.is_set():
                far.shutdown(socket.SHUT_RDWR)

    def _back(self, far: socket.socket, near: socket.socket, cut: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while (data := far.recv(1 << 16)) and not cut.is_set():
                near.sendall(data)
            near.shutdown(socket.SHUT_RDWR)


def simulated(**changes: Any) -> tuple[Any, list[Receipt], torch.Tensor]:
    chosen = tiny("ace", strategy={"name": "ace", "held": "client"}, training={"method": "loop"}, **changes)
    prepared = prepare(chosen)
    rows = [row for row in prepared.simulator.rows() if not isinstance(row, Measurement)]
    return chosen, rows, prepared.simulator.server.model()


def submit(task: RemoteTask, train: Any) -> Receipt:
    result = train(task)
    return task.submit(result.model, examples=result.examples, steps=result.steps, rate=result.rate)


@pytest.mark.parametrize("loses", ["reply", "update"])
def test_differences_survive_lost_receipts_and_the_ends_of_processes(loses: str, tmp_path: Path) -> None:
    """ACE held by clients, every third update in trouble: the model has the bits of the undisturbed simulation."""
    chosen, rows, model = simulated(stop={"updates": 20})
    with live(chosen, tmp_path / "run") as server:
        wire = Lossy(server.url)
        train = by_config(server.client().about()["config"])

        def joined(number: int) -> Client:
            keep = tmp_path / "keep"
            return Client(wire.url, server.token, client=number, wait=5.0, patience=0.4, keep=keep)

        clients = {number: joined(number) for number in range(5)}
        waiting = sorted(rows, key=lambda row: row.number)
        out: dict[int, RemoteTask] = {}
        version = 0
        for place, row in enumerate(rows):
            while waiting and waiting[0].base == version and waiting[0].client not in out:
                first = waiting.pop(0)
                task = clients[first.client].next_task()
                assert task is not None and task.version == version
                out[first.client] = task
            task = out.pop(row.client)
            if place % 6 == 2:  # lost once: sent again, by the same process
                wire.lose(loses, once=True)
                assert not submit(task, train).refused
            elif place % 6 == 5:  # lost until it gives up; another process goes on
                wire.lose(loses, once=False)
                with pytest.raises(InputError, match="did not answer"):
                    submit(task, train)
                wire.lose("", once=True)
                clients[row.client].close()
                clients[row.client] = joined(row.client)
                if loses == "update":  # it is asked for, still
                    again = clients[row.client].next_task()
                    assert again is not None and again.number == task.number
                    other = again.base + 1  # whatever comes of training anew: what was sent first is sent
                    assert not again.submit(other, examples=1).refused
            else:
                assert not submit(task, train).refused
            version = server.client().status()["version"]
        assert wire.lost >= 6
        assert server.client().status()["updates"] == len(rows)
        assert torch.equal(server.client().model("latest")[1], model)
        for client in clients.values():
            client.close()
        wire.door.close()


def test_who_forgot_what_is_in_the_model_is_not_let_on(tmp_path: Path) -> None:
    chosen, *_ = simulated(stop={"updates": 1})
    with live(chosen, tmp_path / "run") as server:
        task = server.client(0).next_task()
        assert task is not None and not task.submit(task.base + 1, examples=1).refused
        with pytest.raises(InputError, match="1 updates of client 0 are in the model, but 0 are remembered"):
            stranger(server, 0)


def stranger(server: Live, number: int) -> None:
    """Clients that are heard wait for the others first: those are heard here."""
    for other in range(1, 5):
        task = server.client(other).next_task()
        assert task is not None
        task.submit(task.base, examples=1)
    server.client(number).next_task()


def test_what_rounding_left_out_is_remembered_by_the_next_process(tmp_path: Path) -> None:
    """Ten int8 updates over two processes: what arrived differs from what was meant by one update's rounding."""
    chosen = tiny("asgd", strategy={"name": "asgd", "lr": 1.0})
    with live(chosen, tmp_path / "run") as server:
        start = server.client().model("latest")[1].clone()
        meant = torch.zeros_like(start)
        generator = torch.Generator().manual_seed(3)
        for _ in range(2):
            with Client(
                server.url, server.token, client=0, transport="int8", keep=tmp_path / "keep"
            ) as client:
                for task in client.tasks(5):
                    delta = torch.randn(len(start), generator=generator) / 100
                    meant += delta
                    task.submit(task.base + delta, examples=1)
        arrived = server.client().model("latest")[1] - start
        left = Memory(tmp_path / "keep", server.client().about()["run"]).settle(0, 10, True).kept["left"]
        assert torch.allclose(arrived + left, meant, atol=1e-5)
        assert (
            float((arrived - meant).abs().max()) < 2 * 0.05 / 127
        )  # the largest of a delta, over int8's steps


def test_a_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    memory = Memory(tmp_path, "a")
    memory.settle(0, 0, True)
    memory.note(0, "l", {"model": torch.ones(3), "previous": torch.ones(3)})
    assert torch.equal(Memory(tmp_path, "a").settle(0, 1, True).kept["previous"], torch.ones(3))
    (tmp_path / "a-0.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"a-0\.safetensors cannot be read"):
        Memory(tmp_path, "a").settle(0, 0, True)
