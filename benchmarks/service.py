"""How many updates a second the service takes from many clients at once, beside a bare handler's figure.

    python benchmarks/service.py [--seconds 120] [--turns 6] [--clients 1000] [--megabytes 1]

Two servers are up: a bare handler under the same HTTP server, which sends a model, receives one and appends it to a
file with the same group commit (one fsync for what waits), and `afield serve` with fedbuff. They are loaded in turns,
since a disk's speed drifts; the ratio is the median over turns. The load comes from another process over loopback:
every client asks for a task, downloads the model, sends one back, again and again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
NET = """
from torch import nn
class Net(nn.Linear):
    def __init__(self):
        super().__init__({width}, 1, bias=False)
"""


# -- the load -------------------------------------------------------------------------------------------------


class Wire(asyncio.Protocol):
    """One keep-alive connection: a request at a time, bodies of replies counted and, if short, kept."""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.reply, self.writable = transport, None, asyncio.Event()
        self.writable.set()
        self.head, self.left, self.body, self.status = b"", -1, bytearray(), 0
        transport.set_write_buffer_limits(1 << 20)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.writable.set()
        if self.reply is not None and not self.reply.done():
            self.reply.set_exception(ConnectionResetError())

    def data_received(self, data: bytes) -> None:
        if self.left < 0:
            self.head += data
            end = self.head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data, self.head = self.head[:end].lower(), self.head[end + 4 :], b""
            self.status = int(head[9:12])
            at = head.find(b"content-length: ")
            self.left = int(head[at + 16 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            self.keep, self.body = self.left < 65536, bytearray()
        if self.keep:
            self.body += data
        self.left -= len(data)
        if self.left == 0:
            self.left = -1
            self.reply.set_result((self.status, bytes(self.body)))

    async def ask(self, head: bytes, body: memoryview | None = None) -> tuple[int, bytes]:
        self.reply = asyncio.get_running_loop().create_future()
        self.transport.write(head)
        if body is not None:
            for start in range(0, len(body), 1 << 18):
                await self.writable.wait()
                self.transport.write(body[start : start + (1 << 18)])
        return await self.reply


async def one(
    number: int,
    port: int,
    token: str,
    body: memoryview,
    end: float,
    most: int,
    log: dict[str, Any],
    bare: bool,
) -> None:
    _, wire = await asyncio.get_running_loop().create_connection(Wire, HOST, port)
    rest = f" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
    sent = f"Content-Type: application/octet-stream\r\nContent-Length: {len(body)}\r\n\r\n"
    while time.monotonic() < end and log["updates"] < most:
        began = time.monotonic()
        task = {"version": 0, "number": 0, "lease": ""}
        if not bare:
            status, reply = await wire.ask(
                f"POST /v1/tasks?client={number}&wait=20{rest}Content-Length: 0\r\n\r\n".encode()
            )
            log["statuses"][status] += 1
            if status != 200:
                await asyncio.sleep(0 if status == 204 else 0.2)
                continue
            task = json.loads(reply)
        log["checkout"].append(time.monotonic() - began)
        began = time.monotonic()
        status, _ = await wire.ask(f"GET /v1/models/{task['version']}{rest}\r\n".encode())
        log["statuses"][status] += 1
        log["download"].append(time.monotonic() - began)
        began, again = time.monotonic(), True
        while again:
            path = f"PUT /v1/tasks/{task['number']}/update?examples=1&lease={task['lease']}"
            status, reply = await wire.ask(f"{path}{rest}{sent}".encode(), body)
            log["statuses"][status] += 1
            again = status in (429, 503) and time.monotonic() < end + 30
            if again:
                await asyncio.sleep(0.2)
        if status == 200:
            log["submit"].append(time.monotonic() - began)
            log["updates"] += 1
            if not bare:
                log["receipts"].append(json.loads(reply)["number"])
    wire.transport.close()


def load(
    port: int, token: str, clients: int, body: bytes, seconds: float, most: int, bare: bool, out: Any
) -> None:
    """The load generator's process."""
    import uvloop

    async def main() -> dict[str, Any]:
        log: dict[str, Any] = {
            "checkout": [],
            "download": [],
            "submit": [],
            "receipts": [],
            "updates": 0,
            "statuses": Counter(),
        }
        began = time.monotonic()
        work = (
            one(n, port, token, memoryview(body), began + seconds, most, log, bare) for n in range(clients)
        )
        ends = await asyncio.gather(*work, return_exceptions=True)
        log["errors"] = Counter(repr(error) for error in ends if error is not None)
        return {**log, "seconds": time.monotonic() - began}

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    out.put(uvloop.run(main()))


def loaded(
    port: int, token: str, clients: int, body: bytes, seconds: float, most: int, bare: bool
) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    process = context.Process(target=load, args=(port, token, clients, body, seconds, most, bare, out))
    process.start()
    try:
        return out.get(timeout=seconds + 180)
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()


# -- the bare handler -----------------------------------------------------------------------------------------


def bare_server(size: int, path: str) -> None:
    """Sends `size` bytes, receives a body and appends it; one fsync for all that wait."""
    import socket

    import uvicorn
    import uvloop

    from afield.runtimes.service.protocol import Http

    model, file = memoryview(bytes(size)), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    queue: list[Any] = []
    wake = threading.Condition()

    def append(loop: asyncio.AbstractEventLoop) -> None:
        while True:
            with wake:
                while not queue:
                    wake.wait()
                taken, queue[:] = queue[:64], queue[64:]
            os.writev(file, [body for body, _ in taken])
            os.fdatasync(file)
            loop.call_soon_threadsafe(lambda taken=taken: [done.set_result(None) for _, done in taken])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] == "GET":
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"content-length", str(size).encode())],
                }
            )
            for start in range(0, size, 1 << 18):
                await send(
                    {
                        "type": "http.response.body",
                        "body": model[start : start + (1 << 18)],
                        "more_body": True,
                    }
                )
            await send({"type": "http.response.body", "body": b""})
            return
        length = int(dict(scope["headers"])[b"content-length"])
        body, at = bytearray(length), 0
        async with room:
            while True:
                message = await receive()
                body[at : at + len(message["body"])] = message["body"]
                at += len(message["body"])
                if not message.get("more_body"):
                    break
            done = asyncio.get_running_loop().create_future()
            with wake:
                queue.append((body, done))
                wake.notify()
            await done
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})

    async def main() -> None:
        nonlocal_room()
        listening = socket.create_server((HOST, 0), backlog=4096)
        print(listening.getsockname()[1], flush=True)
        threading.Thread(target=append, args=(asyncio.get_running_loop(),), daemon=True).start()
        config = uvicorn.Config(app, http=Http, ws="none", lifespan="off", log_config=None, access_log=False)
        await uvicorn.Server(config).serve(sockets=[listening])

    room: Any = None

    def nonlocal_room() -> None:
        nonlocal room
        room = asyncio.Semaphore(max(4, 512 * 2**20 // size))

    uvloop.run(main())


# -- both -----------------------------------------------------------------------------------------------------


def shown(name: str, log: dict[str, Any], size: int) -> float:
    rate = log["updates"] / log["seconds"]
    print(f"\n{name}: {log['updates']} updates in {log['seconds']:.1f} s: {rate:.0f} a second", end=", ")
    print(f"{2 * rate * size / 1e6:.0f} MB/s both ways")
    for part in ("checkout", "download", "submit"):
        found = sorted(log[part])
        if found and found[-1] > 0.001:
            p50, p99 = statistics.median(found), found[int(len(found) * 0.99)]
            print(f"  {part:9} p50 {p50 * 1e3:8.1f} ms   p99 {p99 * 1e3:8.1f} ms")
    print(f"  statuses {dict(log['statuses'])}, errors {dict(log['errors'])}")
    return rate


def memory(pid: int) -> tuple[float, float]:
    """Resident now and at most, in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = {
        line.split(":")[0]: int(line.split()[1]) / 1e3 for line in text.splitlines() if line.startswith("Vm")
    }
    return found["VmRSS"], found["VmHWM"]


def joined(logs: list[dict[str, Any]]) -> dict[str, Any]:
    """Several turns as one."""
    found: dict[str, Any] = {
        key: [value for log in logs for value in log[key]]
        for key in ("checkout", "download", "submit", "receipts")
    }
    for key in ("statuses", "errors"):
        found[key] = sum((log[key] for log in logs), Counter())
    return found | {key: sum(log[key] for log in logs) for key in ("updates", "seconds")}


def started(command: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A server, and the first line that it says."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    return process, process.stdout.readline()


def run(
    seconds: float,
    clients: int,
    megabytes: float,
    most: int,
    folder: Path,
    bare_too: bool = True,
    turns: int = 1,
) -> dict[str, Any]:
    width = int(megabytes * 1e6 / 4)
    (folder / "net.py").write_text(NET.format(width=width))
    command = [
        "-m", "afield", "serve", "--out", str(folder / "run"), "--port", "0",
        "--model", f"{folder / 'net.py'}:Net", "--strategy", "fedbuff",
        "--set", f"scenario.clients={clients}", "--set", "measure.time=10", "--lease", "120",
    ]  # fmt: skip
    process, line = started(command)
    bare: subprocess.Popen[str] | None = None
    try:
        assert line.startswith("serving at"), line
        port = int(line.rpartition(":")[2])
        token = (folder / "run.keys" / "operator.token").read_text().strip()
        if bare_too:
            bare, line = started([__file__, "--bare", str(width * 4), str(folder / "bare")])
            door = int(line)
        from torch import nn

        from afield.core.flat import Layout
        from afield.runtimes.service.client import Client
        from afield.runtimes.service.wire import Wire as Models

        head = Models(Layout.of(nn.Linear(width, 1, bias=False))).heads["full"]
        logs: dict[str, list[dict[str, Any]]] = {"bare": [], "service": []}
        for turn in range(turns):
            share = seconds / turns, most // turns
            if bare is not None:
                logs["bare"].append(loaded(door, "none", clients, bytes(width * 4), *share, True))
            logs["service"].append(loaded(port, token, clients, head + bytes(width * 4), *share, False))
            rates = {
                name: part[turn]["updates"] / part[turn]["seconds"] for name, part in logs.items() if part
            }
            print(
                f"turn {turn + 1}: " + ", ".join(f"{name} {rate:.0f}/s" for name, rate in rates.items()),
                flush=True,
            )
        found: dict[str, Any] = {}
        if bare is not None:
            found["bare"] = shown("bare handler", joined(logs["bare"]), width * 4)
        log = joined(logs["service"])
        found["service"] = shown("afield serve", log, width * 4)
        with Client(f"http://{HOST}:{port}", token, patience=30.0) as client:
            told = client.status()
        doubled = len(log["receipts"]) - len(set(log["receipts"]))
        lost = told["updates"] - len(log["receipts"])
        print(f"  updates: {told['updates']} folded, {len(log['receipts'])} acknowledged", end=", ")
        print(f"{doubled} twice, {lost} unaccounted for")
        now, peak = memory(process.pid)
        print(f"  memory: {now:.0f} MB now, {peak:.0f} MB at most (a model: {width * 4 / 1e6:.1f} MB)")
        found |= {
            "doubled": doubled,
            "lost": lost,
            "peak": peak,
            "updates": told["updates"],
            "errors": dict(log["errors"]),
        }
        process.terminate()
        process.wait(60)
        found["ended"] = process.returncode
    finally:
        for one in (process, bare):
            if one is not None:
                one.kill()
                one.wait()
    if bare_too:
        pairs = zip(logs["bare"], logs["service"], strict=True)
        found["ratio"] = statistics.median(
            a["updates"] / a["seconds"] * b["seconds"] / b["updates"] for a, b in pairs
        )
        print(f"\nthe bare handler is {found['ratio']:.2f} times as fast")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--most", type=int, default=20_000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-bare", action="store_true")
    parser.add_argument("--bare", nargs=2)
    options = parser.parse_args()
    if options.bare:
        bare_server(int(options.bare[0]), options.bare[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        seconds, turns = (10.0, 1) if options.quick else (options.seconds, options.turns)
        load = (options.clients, options.megabytes, options.most)
        run(seconds, *load, Path(folder), not options.no_bare, turns)


if __name__ == "__main__":
    main()
