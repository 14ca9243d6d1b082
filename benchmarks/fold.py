"""What one arrival costs the server, against the bytes that it must move at this machine's copy speed.

    python benchmarks/fold.py [--quick] [--size N]

An arrival is `Server.submit` of one update, guard included, and `Server.checkout` of the next task, at steady
state: rows written, buffers recycled. Copies, arrivals at N = 10 and arrivals at N = 1,000 take turns, so that
whatever else the machine does falls on all three alike. Threads are torch's own; OMP_NUM_THREADS=1 for one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from afield.core.server import Server
from afield.core.types import Task, Update
from afield.strategies import ACE, ACED, CA2FL, TWAFL, FedAsync, FedBuff, FedStale, MRAsyncFL

SIZE = 11_200_000  # ResNet-18
LARGE = 64 * 2**20  # elements of each copy buffer: 256 MB, beyond any cache
FLIGHT = 10  # tasks in flight; also the size of a buffer and of a round
TOUCHED = {10: 10, 1000: 30}  # clients -> how many of them ever answer: 1,000 rows of 45 MB do not fit
SENT = 4  # trained models that arrive in turn, as cold as from a network

# Bytes an element. Every input is read once, every output written once.
GUARD = 4  # the model is read for NaN and Inf before anything changes: a pass of its own
MODEL = BASE = 4  # read
ROW = 4 + 4  # the client's old row read, the new one written
NARROW = 4 + 4  # a float32 vector read and written
WIDE = 8 + 8  # a float64 sum read and written
VERSION = 4 + 4  # the newest version copied at its first checkout
ONCE = 1 / FLIGHT  # what a step costs, where there is one per FLIGHT arrivals


@dataclass(frozen=True)
class Case:
    """A strategy and what one arrival must move; `beat` arrivals are timed together where costs alternate."""

    strategy: Any
    bytes: float
    beat: int = 1


CASES = {
    # w
    "fedasync": Case(FedAsync(), GUARD + MODEL + NARROW + VERSION),
    # the row, w
    "mr-asyncfl": Case(MRAsyncFL(), GUARD + MODEL + ROW + NARROW + VERSION),
    # the buffer's sum; at a step w (the sum is at hand)
    "fedbuff": Case(
        FedBuff(size=FLIGHT), GUARD + MODEL + BASE + NARROW + ONCE * (NARROW + VERSION), beat=FLIGHT
    ),
    # the row, the buffer's sum; at a step w and the mean cache
    "ca2fl": Case(
        CA2FL(size=FLIGHT),
        GUARD + MODEL + BASE + ROW + WIDE + ONCE * (NARROW + WIDE + VERSION),
        beat=FLIGHT,
    ),
    # the row, the sum of all rows, w
    "ace": Case(ACE(warmup="zeros"), GUARD + MODEL + BASE + ROW + WIDE + NARROW + VERSION),
    # as ace, and the row of the client that expires is read: everyone is out by its next arrival
    "aced": Case(ACED(max_delay=4), GUARD + MODEL + BASE + ROW + WIDE + NARROW + VERSION + 4),
    # the row, the weighted sum of all rows; w is written, not read
    "twafl": Case(TWAFL(), GUARD + MODEL + ROW + WIDE + 4 + VERSION),
    # the row, the round's two sums; at its end w, both sums read and zeroed, the sum of all rows
    "fedstale": Case(
        FedStale(),
        GUARD + MODEL + BASE + ROW + NARROW + WIDE + ONCE * (NARROW + NARROW + WIDE + WIDE + VERSION),
        beat=FLIGHT,
    ),
}


class Traffic:
    """A server whose clients answer in turn, FLIGHT of them at a time."""

    def __init__(self, strategy: Any, clients: int, sent: list[Tensor]) -> None:
        self.server = Server(strategy, sent[0].clone(), clients)
        self.rounds = getattr(strategy, "pace", "arrival") == "round"
        self.sent = sent
        self.touched = TOUCHED[clients]
        self.next = 0
        self.arrived = 0
        state: Any = self.server.state
        if isinstance(strategy, ACED):  # as if all had answered the warm-up with a delta of 0
            state.stamps.fill_(1)
            state.count = state.cohort = clients
            state.version = 1
        self.tasks: deque[Task] = deque()
        for _ in range(FLIGHT):
            self.checkout()

    def checkout(self) -> None:
        self.tasks.append(self.server.checkout(self.next % self.touched, 0.0))
        self.next += 1

    def arrive(self) -> None:
        model = self.sent[self.arrived % SENT]
        self.arrived += 1
        receipt = self.server.submit(Update(self.tasks.popleft(), model, None, examples=1))
        assert not receipt.refused
        if not self.rounds:
            self.checkout()
        elif not self.tasks:
            self.server.close_round()
            for _ in range(FLIGHT):
                self.checkout()

    def beat(self, arrivals: int) -> None:
        for _ in range(arrivals):
            self.arrive()


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(case: Case, size: int, beats: int, buffers: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Medians: the copy speed in bytes a second, and seconds per arrival by number of clients."""
    draw = torch.Generator().manual_seed(0)
    sent = [torch.randn(size, generator=draw) for _ in range(SENT)]
    traffics = {clients: Traffic(case.strategy, clients, sent) for clients in TOUCHED}
    for clients, traffic in traffics.items():
        traffic.beat(TOUCHED[clients] + 2 * FLIGHT)  # every row written, every buffer in use once
    copies: list[float] = []
    times: dict[int, list[float]] = {clients: [] for clients in TOUCHED}
    source, target = buffers
    for _ in range(beats):
        copies.append(2 * source.nbytes / seconds(lambda: target.copy_(source)))
        for clients, traffic in traffics.items():
            times[clients].append(seconds(lambda traffic=traffic: traffic.beat(case.beat)) / case.beat)
    few, many = (statistics.median(times[clients]) for clients in (10, 1000))
    return {"copy": statistics.median(copies), "few": few, "many": many}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, few arrivals: under 15 s")
    parser.add_argument("--size", type=int, help=f"parameters of the model (default {SIZE:,})")
    options = parser.parse_args()
    size = options.size or (SIZE // 8 if options.quick else SIZE)
    beats, rest = (9, 3) if options.quick else (31, 11)  # rest: where a beat is FLIGHT arrivals
    buffers = torch.ones(LARGE), torch.ones(LARGE)
    buffers[1].copy_(buffers[0])
    print(f"{size:,} float32 parameters, {torch.get_num_threads()} threads; times are medians per arrival\n")
    print(
        f"{'strategy':<12}{'bytes':>10}{'copy':>12}{'at copy speed':>15}{'N = 10':>11}{'N = 1,000':>11}{'over':>7}"
    )
    ratios, speeds = {}, []
    for name, case in CASES.items():
        found = measure(case, size, beats if case.beat == 1 else rest, buffers)
        floor = case.bytes * size / found["copy"]
        over, growth = max(found["few"], found["many"]) / floor, found["many"] / found["few"]
        speeds.append(found["copy"])
        ratios[name] = {"over_bytes": round(over, 3), "n1000_over_n10": round(growth, 3)}
        print(
            f"{name:<12}{case.bytes * size / 1e6:>7.0f} MB{found['copy'] / 1e9:>7.1f} GB/s{1e3 * floor:>12.1f} ms"
            f"{1e3 * found['few']:>8.1f} ms{1e3 * found['many']:>8.1f} ms{over:>7.2f}",
            flush=True,
        )
    print("\nover: the slower of the two, over the time that a plain copy of as many bytes takes")
    result = {
        "benchmark": "fold",
        "size": size,
        "threads": torch.get_num_threads(),
        "copy_gb_s": round(statistics.median(speeds) / 1e9, 2),
        "ratios": ratios,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
