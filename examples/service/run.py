"""The walk-through of README.md by itself, on this machine: a server with TLS and three clients, each a real process.

    python examples/service/run.py [--out FOLDER] [--updates 60] [--seconds 180]

Client 1 is slow, client 2 is killed in the middle of a task. Ends only what it started.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from net import Net
from pyarrow import parquet
from sklearn.datasets import load_digits

import afield

HERE = Path(__file__).resolve().parent
PAUSES = (0.15, 0.9, 0.3)  # seconds that each client is slower than its training alone
LEASE = 3.0  # seconds; on real machines 600
AFIELD = [sys.executable, "-m", "afield"]


def deal(folder: Path) -> None:
    """Every third of 1,500 digits to each client, the rest to the server, to measure with."""
    digits = load_digits()
    inputs, targets = (digits.data / 16).astype(np.float32), digits.target
    for name, part in (*((str(k), slice(k, 1500, 3)) for k in range(3)), ("test", slice(1500, None))):
        (folder / name).mkdir(parents=True)
        np.save(folder / name / "inputs.npy", inputs[part])
        np.save(folder / name / "targets.npy", targets[part])


class Started:
    """A process with its log; ended with the `with` that it was started in."""

    def __init__(self, stack: ExitStack, log: Path, *command: str | Path) -> None:
        self.log = log
        with log.open("w") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
            self.process = subprocess.Popen(
                [*map(str, command)], stdout=file, stderr=subprocess.STDOUT, cwd=HERE, env=environment
            )
        stack.callback(self.end)

    def lines(self, beginning: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.startswith(beginning)]

    def end(self, by: signal.Signals = signal.SIGINT) -> None:
        """Ask it to stop; after ten seconds it is made to."""
        if self.process.poll() is None:
            self.process.send_signal(by)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def until(true: Callable[[], Any], deadline: float, watched: Started) -> Any:
    while not (value := true()):
        if watched.process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"it did not happen in time; the server's log:\n{watched.log.read_text()}")
        time.sleep(0.01)
    return value


def accuracy(vector: torch.Tensor, folder: Path) -> float:
    """Of a model that was downloaded, by the network of net.py and nothing of the server's."""
    net = Net()
    torch.nn.utils.vector_to_parameters(vector, net.parameters())
    inputs, targets = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("inputs", "targets"))
    return float((net(inputs).argmax(1) == targets).double().mean())


def walk(folder: Path, updates: int, deadline: float) -> dict[str, Any]:
    folder = folder.resolve()
    deal(folder / "data")
    subprocess.run(["sh", HERE / "certificates.sh", folder / "certificates"], check=True)
    run, ca = folder / "run", folder / "certificates" / "ca.pem"
    with ExitStack() as stack:
        # Machine A.
        server = Started(
            stack, folder / "server.log", *AFIELD, "serve", "service.toml", "--model", "net.py:Net",
            "--test", folder / "data" / "test", "--out", run, "--port", "0", "--lease", str(LEASE),
            "--cert", folder / "certificates" / "server.pem", "--key", folder / "certificates" / "server.key",
        )  # fmt: skip
        url = until(lambda: server.lines("serving at "), deadline, server)[0].removeprefix("serving at ")
        for k in range(3):
            made = subprocess.run(
                [*AFIELD, "token", "add", "--out", run, "--clients", str(k), "--note", f"machine B{k}"],
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            (folder / f"{k}.token").write_text(made.stdout)
        # Machine B.
        clients = [
            Started(
                stack, folder / f"client-{k}.log", sys.executable, "client.py", url, "--data",
                folder / "data" / str(k), "--token-file", folder / f"{k}.token", "--ca", ca,
                "--pause", str(PAUSES[k]),
            )
            for k in range(3)
        ]  # fmt: skip
        print(f"serving at {url}; clients 0, 1 (slow) and 2 have joined")
        # Client 2 dies over its third task: no goodbye, no update.
        lost = until(lambda: clients[2].lines("task ")[4:], deadline, server)[0].split()[1]
        clients[2].process.kill()
        killed = time.monotonic()
        print(f"client 2 was killed over task {lost}")
        token = (run.with_name("run.keys") / "operator.token").read_text().strip()
        operator = stack.enter_context(afield.Client(url, token, ca=ca, patience=10.0))
        until(lambda: operator.status()["ended"].get("expired"), deadline, server)
        back = time.monotonic() - killed
        print(f"its lease ended {back:.1f} s later: the slot went back")
        until(lambda: operator.status()["updates"] >= updates, deadline, server)
        promoted = operator.request("POST", "/v1/promote").json()["promoted"]
        reached = accuracy(operator.model("promoted")[1], folder / "data" / "test")
        for client in clients[:2]:
            client.end()
        server.end(signal.SIGTERM)  # drains, snapshots, goes
    audit = [json.loads(line) for line in (run / "audit.jsonl").read_text().splitlines()]
    rows = parquet.read_table(run / "receipts").to_pylist()
    return {
        "updates": [sum(row["client"] == k and not row["refused"] for row in rows) for k in range(3)],
        "expired": [(row["client"], row["number"]) for row in audit if row["act"] == "ended"][:1],
        "lost": (2, int(lost)),
        "after": back,
        "promoted": promoted,
        "accuracy": reached,
        "server": server.process.returncode,
        "alive": [process.process.poll() is None for process in (server, *clients)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep everything in this new folder")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=180.0, help="give up after so long")
    chosen = parser.parse_args()
    if chosen.out is not None and chosen.out.exists():
        parser.error(f"{chosen.out} exists: name a new folder")
    with tempfile.TemporaryDirectory() as spare:
        found = walk(chosen.out or Path(spare) / "out", chosen.updates, time.monotonic() + chosen.seconds)
    for k, (count, kind) in enumerate(zip(found["updates"], ("", "slow", "killed"), strict=True)):
        print(f"client {k}: {count:3d} updates  {kind}".rstrip())
    print(
        f"promoted: version {found['promoted']}, {found['accuracy']:.1%} right on digits that no client has"
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
