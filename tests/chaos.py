"""Clients that vanish, stall, repeat themselves, send garbage and are cut off, against a server that is killed."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from served import Process, body_of, put

from afield.core.errors import InputError
from afield.core.server import Server
from afield.core.types import Receipt, Update
from afield.runtimes.service.client import Client, RemoteTask
from afield.store.journal import Journal


class Mob:
    """Many clients, each in its own bad way; what was acknowledged is written down."""

    def __init__(self, url: str, token: str, clients: int, seed: int) -> None:
        self.url, self.token, self.seed = url, token, seed
        self.over = threading.Event()
        self.receipts: dict[int, dict[str, Any]] = {}  # by task: what the client was told
        self.differing: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.counts = dict.fromkeys(
            ("good", "twice", "garbage", "oversized", "cut", "vanished", "stalled"), 0
        )
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self._live, args=(k,), daemon=True) for k in range(clients)]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()

    def _live(self, number: int) -> None:
        luck = random.Random(f"{self.seed} {number}")
        while not self.over.is_set():
            # a short patience, so that a thread sees the end
            with (
                contextlib.suppress(InputError, httpx.TransportError, OSError),
                Client(self.url, self.token, client=number, wait=1.0, patience=20.0) as client,
                httpx.Client(
                    base_url=self.url, headers={"Authorization": f"Bearer {self.token}"}, timeout=20
                ) as http,
            ):
                while not self.over.is_set():
                    task = client.next_task()
                    if task is not None:
                        self._deal(task, http, luck)

    def _deal(self, task: RemoteTask, http: httpx.Client, luck: random.Random) -> None:
        ways: dict[str, Callable[[], None]] = {
            "good": lambda: self._send(task, http, luck),
            "twice": lambda: [self._send(task, http, luck) for _ in range(3)] and None,
            "garbage": lambda: self._garbage(task, http, luck),
            "oversized": lambda: put(http, task, body_of(task) + bytes(3 * 10**5)) and None,
            "cut": lambda: self._cut(task, luck),
            "vanished": lambda: None,
            "stalled": lambda: self._cut(task, luck, stall=luck.uniform(0.1, 1.5)),
        }
        way = luck.choices(list(ways), [10, 4, 2, 1, 3, 1, 1])[0]
        self.counts[way] += 1
        ways[way]()
        if way in ("garbage", "oversized", "cut", "stalled"):  # and then the update itself, as a retry would
            self._send(task, http, luck)

    def _send(self, task: RemoteTask, http: httpx.Client, luck: random.Random) -> None:
        value = luck.uniform(-0.5, 0.5)
        while not self.over.is_set():
            try:
                reply = put(http, task, body_of(task, value), examples=luck.randint(1, 9))
            except httpx.TransportError:
                self.over.wait(luck.uniform(0.02, 0.3))  # the server is down, or went down: send it again
                continue
            if reply.status_code == 200:
                self._note(reply.json())
            elif reply.status_code in (429, 503):
                self.over.wait(0.1)
                continue
            return

    def _note(self, told: dict[str, Any]) -> None:
        told.pop("repeated")
        with self.lock:
            first = self.receipts.setdefault(told["number"], told)
            if first != told:
                self.differing.append((first, told))

    def _garbage(self, task: RemoteTask, http: httpx.Client, luck: random.Random) -> None:
        body = bytearray(body_of(task))
        for _ in range(luck.randint(1, 40)):
            body[luck.randrange(min(200, len(body)))] = luck.randrange(256)
        with contextlib.suppress(httpx.TransportError):
            reply = put(http, task, bytes(body))
            if reply.status_code == 200:  # what was hit did not matter, say a name of the metadata
                self._note(reply.json())

    def _cut(self, task: RemoteTask, luck: random.Random, stall: float = 0.0) -> None:
        host, port = self.url.removeprefix("http://").split(":")
        body = body_of(task)
        head = (
            f"PUT /v1/tasks/{task.number}/update?lease={task.told['lease']}&examples=1 HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {self.token}\r\nContent-Type: application/octet-stream\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 5) as raw:
            raw.sendall(head.encode() + body[: luck.randrange(len(body))])
            self.over.wait(stall)


def rampage(
    folder: Path, arguments: list[str], port: int, *, clients: int, kills: int, seconds: float, seed: int
) -> Mob:
    """Kill the server so many times in so long; at the end it is let go in peace."""
    luck = random.Random(seed)
    process = Process(folder, [*arguments, "--port", str(port)])
    mob = Mob(process.url, process.token, clients, seed)
    began = time.monotonic()
    mob.start()
    try:
        for kill in range(1, kills + 1):
            due = began + seconds * (kill - luck.random()) / kills
            known = len(mob.receipts)
            while time.monotonic() < due or len(mob.receipts) == known:
                assert time.monotonic() < due + 60, "no update came through"
                time.sleep(0.01)
            process.kill()
            process = Process(folder, [*arguments, "--port", str(port)])
            assert process.url
        while time.monotonic() < began + seconds:
            time.sleep(0.05)
    finally:
        mob.stop()
        status = process.terminate()
    assert status == 0, process.log.read_text()
    return mob


def replayed(server: Server, store: Path) -> tuple[Server, dict[int, Receipt]]:
    """The journal from its first record on, by hand: nothing but core's verbs. No number may be folded twice."""
    receipts: dict[int, Receipt] = {}
    for _, value in Journal(store).replay():
        if isinstance(value, Update):
            receipt = server.submit(value)
            assert not receipt.refused and receipt.number not in receipts
            receipts[receipt.number] = receipt
        elif value["act"] == "checkout":
            server.checkout(value["client"], value["now"], value["version"])
        elif value["act"] == "cancel":
            server.cancel(server.leases[value["task"]].task)
        else:
            server.close_round()
    return server, receipts


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.int32), second.view(torch.int32))
