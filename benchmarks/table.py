"""Tables of clients' vectors on disk: the memory that they take, and what an arrival costs beside one in memory.

    python benchmarks/table.py [--quick] [--clients N] [--size P] [--precision int8] [--folder DIR]

First two equal tables, one in memory and one on disk, arrivals taking turns. Then the large one: filled, then
arrivals of clients at random (a row is read, another is written), while the resident set is read from /proc. The
disk's own speed is measured in the same folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afield.core.places import free_memory, size, tables
from afield.core.server import Server
from afield.core.table import PRECISIONS
from afield.core.types import Update
from afield.strategies import ACE

SENT = 4  # trained models that arrive in turn
AGAIN = 1000  # arrivals among all clients
SIDE_BY_SIDE = 300  # clients, and arrivals, of the comparison


def resident() -> int:
    """Bytes of memory that this process has: what a mapped file had touched would count, the page cache does not."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def served(clients: int, sent: list[Tensor], precision: str, table: str, folder: Path | None) -> Server:
    server = Server(ACE(precision=precision, warmup="zeros"), torch.zeros_like(sent[0]), clients)
    server.keep_tables(table, folder)
    return server


def arrive(server: Server, client: int, model: Tensor) -> float:
    """Seconds of one checkout and submit."""
    start = time.perf_counter()
    receipt = server.submit(Update(server.checkout(client, 0.0), model, None, 1))
    assert not receipt.refused
    return time.perf_counter() - start


def compared(sent: list[Tensor], precision: str, folder: Path, arrivals: int) -> dict[str, Any]:
    """Medians of arrivals, memory and disk in turn; the models must be equal."""
    both = {
        table: served(SIDE_BY_SIDE, sent, precision, table, folder / "side") for table in ("memory", "disk")
    }
    draw = random.Random(0)
    for client in range(SIDE_BY_SIDE):
        for server in both.values():
            arrive(server, client, sent[client % SENT])
    times: dict[str, list[float]] = {table: [] for table in both}
    for count in range(arrivals):
        client, model = draw.randrange(SIDE_BY_SIDE), sent[count % SENT]
        for table, server in both.items():
            times[table].append(arrive(server, client, model))
    assert torch.equal(both["memory"].model(), both["disk"].model())
    shutil.rmtree(folder / "side")
    return {table: 1e3 * statistics.median(taken) for table, taken in times.items()}


def large(clients: int, sent: list[Tensor], precision: str, folder: Path, again: int) -> dict[str, Any]:
    """Milliseconds of an arrival among all clients, and the largest resident set."""
    server = served(clients, sent, precision, "disk", folder / "large")
    table = next(table for _, table in tables(server.state))
    file, most, times = table.file, resident(), []
    assert file is not None
    start = time.perf_counter()
    for client in range(
        clients
    ):  # 20 arrivals, then copies of their rows: rounding 10,000 models tells no more
        if client < 20:
            arrive(server, client, sent[client % SENT])
        else:
            row = file.read(client % 20, "old")
            assert row is not None
            file.blank().copy_(row)
            file.write(client)
        if client % 50 == 0:
            most = max(most, resident())
    filled = time.perf_counter() - start
    draw = random.Random(1)
    for count in range(again):
        times.append(arrive(server, draw.randrange(clients), sent[count % SENT]))
        most = max(most, resident())
    assert file.at is not None and len(file.slots) == clients
    start = time.perf_counter()
    file.picture(1)  # what a snapshot waits for
    synced = time.perf_counter() - start
    gigabytes = os.path.getsize(file.at.path) / 1e9
    shutil.rmtree(folder / "large")
    times.sort()
    return {
        "gb": gigabytes,
        "resident_gb": max(most, resident()) / 1e9,
        "fill_s": filled,
        "ms": 1e3 * times[len(times) // 2],
        "ms_99": 1e3 * times[len(times) * 99 // 100],
        "ms_mean": 1e3 * sum(times) / len(times),
        "sync_s": synced,
    }


def sequential(folder: Path, amount: int) -> float:
    """Bytes a second of a plain file, synced."""
    piece = os.urandom(2**24)
    start = time.perf_counter()
    with (folder / "plain").open("wb", buffering=0) as file:
        for _ in range(amount // len(piece)):
            file.write(piece)
        os.fsync(file.fileno())
    taken = time.perf_counter() - start
    (folder / "plain").unlink()
    return amount // len(piece) * len(piece) / taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the clients: about 20 s")
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=1_000_000)
    parser.add_argument("--precision", choices=PRECISIONS, default="int8")
    parser.add_argument("--folder", type=Path, help="on which disk (default: that of temporary files)")
    options = parser.parse_args()
    clients = options.clients // 10 if options.quick else options.clients
    again, arrivals = (200, 60) if options.quick else (AGAIN, SIDE_BY_SIDE)
    draw = torch.Generator().manual_seed(0)
    sent = [torch.randn(options.size, generator=draw) for _ in range(SENT)]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        need = size(
            next(t for _, t in tables(served(clients, sent, options.precision, "memory", None).state))
        )
        if need > shutil.disk_usage(folder).free:
            raise SystemExit(
                f"{folder} has no room for {need / 1e9:.1f} GB: give --folder, or fewer --clients"
            )
        free = free_memory(sent[0].device)
        print(
            f"{clients:,} clients, {options.size:,} parameters, {options.precision}, ace, "
            f"{torch.get_num_threads()} threads; {free / 1e9:.1f} GB of memory are free"
        )
        speed = sequential(folder, 2**30 // (8 if options.quick else 1))
        side = compared(sent, options.precision, folder, arrivals)
        print(f"the disk writes {speed / 1e9:.2f} GB/s, synced")
        print(
            f"{SIDE_BY_SIDE} clients, an arrival: memory {side['memory']:.2f} ms, disk {side['disk']:.2f} ms "
            f"({side['disk'] / side['memory']:.2f} times); models equal to the bit",
            flush=True,
        )
        found = large(clients, sent, options.precision, folder, again)
    print(f"{found['gb']:.2f} GB of rows, resident set at most {found['resident_gb']:.2f} GB")
    print(
        f"  an arrival: median {found['ms']:.2f} ms, 99 % {found['ms_99']:.2f}, mean {found['ms_mean']:.2f}"
    )
    print(f"  filling {found['fill_s']:.0f} s, sync before a snapshot {found['sync_s']:.2f} s")
    result = {
        "benchmark": "table",
        "clients": clients,
        "size": options.size,
        "precision": options.precision,
        "threads": torch.get_num_threads(),
        "disk_gb_s": round(speed / 1e9, 2),
        "disk_over_memory": round(side["disk"] / side["memory"], 3),
        **{key: round(value, 3) for key, value in found.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
