"""A live service for tests: on a thread with real sockets, or as a process that can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from afield.experiments.config import Config
from afield.experiments.serve import Keeping, first_token, opened
from afield.runtimes.service.client import Client, RemoteTask
from afield.runtimes.service.privacy import Privacy
from afield.runtimes.service.serve import Listen, serve
from afield.runtimes.service.service import Parts, Terms
from afield.runtimes.service.wire import TYPE, raw

SOON = 20.0  # seconds after which a test gives up


def until(true: Callable[[], Any], seconds: float = SOON) -> Any:
    """Wait for a condition; gives its value."""
    end = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
    return value


@dataclass
class Live:
    url: str
    token: str
    keys: Path
    end: Callable[[], None]
    parts: Parts
    clients: list[Any] = field(default_factory=list)

    def client(self, number: int | None = None, token: str | None = None, **options: Any) -> Client:
        made = Client(self.url, token or self.token, client=number, patience=SOON, **{"wait": 5.0, **options})
        self.clients.append(made)
        return made

    def http(self, token: str | None = "", **options: Any) -> httpx.Client:
        """Bare requests: with the operator's token, another, or (None) without."""
        headers = {} if token is None else {"Authorization": f"Bearer {token or self.token}"}
        made = httpx.Client(base_url=self.url, headers=headers, timeout=SOON, **options)
        self.clients.append(made)
        return made


@contextmanager
def live(
    chosen: Config,
    folder: Path,
    *,
    terms: Terms = Terms(),
    keeping: Keeping = Keeping(),
    privacy: Privacy | None = None,
    listen: Listen = Listen(port=0),
    own: str | None = None,
) -> Iterator[Live]:
    """Serve until the end of the `with`, which is as SIGTERM."""
    keys = folder.with_name(folder.name + ".keys")
    started = threading.Event()
    found: list[Live] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with opened(
                chosen, folder, keys, name="test", terms=terms, keeping=keeping, privacy=privacy, own=own
            ) as parts:
                path, _ = first_token(keys)

                def ready(url: str, end: Callable[[], None]) -> None:
                    found.append(Live(url, path.read_text().strip(), keys, end, parts))
                    started.set()

                why = serve(parts, listen, ready)
                assert why == ""
        except BaseException as error:
            failed.append(error)
            started.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(60)
    if failed:
        raise failed[0]
    try:
        yield found[0]
    finally:
        for made in found[0].clients:
            made.close()
        found[0].end()
        thread.join(60)
        assert not thread.is_alive()
    if failed:
        raise failed[0]


def body_of(task: RemoteTask, add: float = 0.125) -> bytes:
    """A model that is the base plus a number."""
    wire = task.owner.wire
    return wire.heads["full"] + bytes(raw(task.base + add))


def put(http: httpx.Client, task: RemoteTask, body: bytes, examples: int = 3, **query: Any) -> httpx.Response:
    told = {"lease": task.told["lease"], "examples": examples, **query}
    return http.put(
        f"/v1/tasks/{task.number}/update", params=told, content=body, headers={"Content-Type": TYPE}
    )


class Process:
    """`afield serve` in a process of its own."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self.folder, self.log = folder, folder.with_name(folder.name + ".log")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "afield", "serve", "--out", str(folder), *arguments]
        self.log.write_text("")
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    @property
    def url(self) -> str:
        def told() -> str:
            assert self.process.poll() is None, self.log.read_text()
            lines = [line for line in self.log.read_text().splitlines() if line.startswith("serving at ")]
            return lines[-1].removeprefix("serving at ") if lines else ""

        found: str = until(told, 60)
        return found

    @property
    def token(self) -> str:
        return (self.folder.with_name(self.folder.name + ".keys") / "operator.token").read_text().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def terminate(self) -> int:
        self.process.terminate()
        return self.process.wait(60)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
