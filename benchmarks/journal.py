"""The journal against the disk itself: MB/s at 11.2 M parameters (a ResNet-18), one sync per batch, alternating.

    python benchmarks/journal.py [--folder DIR] [--batch 4] [--rounds 12] [--quick]

"disk" writes the same bytes in the same blocks, and syncs as often. "journal" packs, sums up, writes and syncs.
"server" is a whole durable server: checkout, guard, journal, fold; "memory" is the same server without a journal.
Medians over rounds; a ratio is the median over rounds of the ratio within a round, since the disk's speed drifts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

from afield.core.server import Server
from afield.core.types import LocalResult, Task, Update
from afield.store.journal import Journal
from afield.store.live import Durable
from afield.strategies import FedAsync

ELEMENTS = 11_181_642
LIMIT = 2 * 2**30  # bytes in one file before a new one is begun


class Disk:
    """Plain writes into one file."""

    def __init__(self, path: Path) -> None:
        self.path, self.fd, self.bytes = path, -1, 0

    def write(self, blocks: list[torch.Tensor]) -> None:
        if self.fd < 0 or self.bytes > LIMIT:
            self.close()
            self.fd, self.bytes = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 0
        for block in blocks:
            left = memoryview(block.view(torch.uint8).numpy())
            while left.nbytes:
                done = os.write(self.fd, left)
                self.bytes += done
                left = left[done:]
        os.fdatasync(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.path.unlink()


def updates(server: Server | Durable, models: list[torch.Tensor], now: float) -> list[Update]:
    tasks = [server.checkout(client, now) for client in range(len(models))]
    return [
        LocalResult(model, 100, 10, 0.1).answer(task, now + 1)
        for task, model in zip(tasks, models, strict=True)
    ]


def emptied(journal: Journal) -> None:
    journal.drop(journal.rotate() + 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    given.rounds = 4 if given.quick else given.rounds
    models = [torch.randn(ELEMENTS) for _ in range(given.batch)]
    size = sum(model.nbytes for model in models) / 1e6
    made = [
        LocalResult(model, 100, 10, 0.1).answer(Task(k, k, 0, 0, 0.0), 1.0) for k, model in enumerate(models)
    ]
    took: dict[str, list[float]] = {name: [] for name in ("disk", "journal", "server", "memory")}
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        disk, journal = Disk(folder / "plain"), Journal(folder / "journal", fsync="batch", segment=LIMIT)
        plain = Server(FedAsync(), torch.zeros(ELEMENTS), given.batch)
        door = Durable(
            Server(FedAsync(), torch.zeros(ELEMENTS), given.batch), folder / "server", fsync="batch", segment=LIMIT,
            every=10**9, seconds=1e9,
        )  # fmt: skip
        door.open()

        def server() -> None:
            door.submit_all(updates(door, models, 0.0))

        def memory() -> None:
            for update in updates(plain, models, 0.0):
                plain.submit(update)

        acts = {
            "disk": lambda: disk.write(models),
            "journal": lambda: journal.extend(made),
            "server": server,
            "memory": memory,
        }
        for k in range(given.rounds + 2):
            for what in list(acts) if k % 2 else reversed(acts):
                os.sync()
                began = time.perf_counter()
                acts[what]()
                if k > 1:
                    took[what].append(time.perf_counter() - began)
            if k % 6 == 5:  # what the folder takes stays bounded; not timed
                emptied(journal)
                door.snapshot()
        disk.close()
        journal.close()
        door.leave()
    print(f"{given.batch} updates of {ELEMENTS:,} float32 per sync, {given.rounds} rounds")
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, {os.cpu_count()} cores"
    )
    figures = {}
    for what, seconds in took.items():
        middle = statistics.median(seconds)
        ratio = statistics.median(a / b for a, b in zip(seconds, took["disk"], strict=True))
        figures[what] = {"MB/s": round(size / middle), "of the disk's time": round(ratio, 3)}
        print(
            f"{what:8s} {size / middle:7.0f} MB/s  {1e3 * middle / given.batch:6.1f} ms an update  "
            f"{ratio:5.2f} x the disk's time (range {size / max(seconds):.0f} .. {size / min(seconds):.0f} MB/s)"
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
