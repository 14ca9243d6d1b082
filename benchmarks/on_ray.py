"""What Ray costs, on a cluster of two nodes on this machine (one CPU each), in a network of its own.

    python benchmarks/on_ray.py [--quick] [--only training|sweep|many]

training: the peers' CNN workload by two actors and by two local workers, in turns. sweep: eight runs by
`afield run --engine ray`, and as eight processes of their own, two at a time. many: sixteen actors whose training is
a nap, which takes no core: whether they are kept busy. Prints medians, and ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "peers"), str(HERE.parent / "tests")]

import torch
import workload
from cluster import cluster, in_own_network
from ours import parts
from torch import Tensor, nn

import afield
from afield.runtimes.ray import RayTrainer
from afield.runtimes.simulate import assemble, thread_count, threads
from afield.runtimes.simulator import Simulator
from afield.runtimes.terms import Stop
from afield.scenarios.data import ClientData
from afield.training.choose import Training
from afield.training.workers import WorkersTrainer

CLIENTS = workload.CLIENTS  # a number travels to an actor, a module beside this file does not
SWEEP = ("run", "default", "--strategy", "fedbuff", "--set", "stop.time=1e9")


def timed(simulator: Simulator, updates: int) -> tuple[float, list[afield.Receipt], Tensor]:
    with threads(thread_count(simulator.server.size, simulator.trainer.method)):
        began = time.perf_counter()
        log = [row for row in simulator.rows() if isinstance(row, afield.Receipt)]
        seconds = time.perf_counter() - began
    return updates / seconds, log, simulator.server.model()


def training(updates: int, turns: int) -> dict[str, Any]:
    """Updates a second; the logs and the models' bits must agree."""
    torch.manual_seed(0)
    module = workload.cnn()
    data = ClientData(*workload.pool(), [torch.tensor(part) for part in workload.parts()])
    with cluster(1, 1):
        trainers: dict[str, Any] = {
            "ray": RayTrainer(module, data, parts()["local"], 0),
            "workers": WorkersTrainer(module, data, parts()["local"], 0, workers=2),
        }
        rates: dict[str, list[float]] = {name: [] for name in trainers}
        for turn in range(turns + 1):  # the first to warm up
            found = {}
            for name in sorted(trainers, reverse=turn % 2 == 1):
                simulator = assemble(
                    afield.FedAsync(), module, data, stop=Stop(updates=updates), by=trainers[name], **parts()
                )
                found[name] = timed(simulator, updates)
                del simulator
                while any(seat.flight for seat in trainers["ray"].crew.seats):  # what the run began, and left
                    trainers["ray"].crew.collect(None)
            if found["ray"][1] != found["workers"][1] or not torch.equal(
                found["ray"][2], found["workers"][2]
            ):
                raise RuntimeError("the event logs or the models of Ray and of local workers differ")
            print(
                "warm" if turn == 0 else turn, {name: round(found[name][0], 1) for name in rates}, flush=True
            )
            if turn:
                for name in rates:
                    rates[name].append(found[name][0])
        trainers["workers"].close()
    pairs = zip(rates["ray"], rates["workers"], strict=True)
    return {
        **{name: statistics.median(found) for name, found in rates.items()},
        "cost": statistics.median(local / ray for ray, local in pairs) - 1,
        "all": rates,
    }


def sweep(updates: int, turns: int) -> dict[str, Any]:
    """Seconds for eight runs, from the command to its end."""
    base = [sys.executable, "-m", "afield", *SWEEP, "--set", f"stop.updates={updates}"]
    # what a run that is given one CPU chooses
    alone = [*base, "--set", "runtime.threads=1"]
    seconds: dict[str, list[float]] = {"ray": [], "processes": []}
    for _ in range(turns):
        with tempfile.TemporaryDirectory() as scratch, cluster(1, 1):
            began = time.perf_counter()
            seeds = ["--set", f"seeds={list(range(8))}", "--engine", "ray"]
            subprocess.run([*base, *seeds, "--out", f"{scratch}/ray"], check=True, capture_output=True)
            seconds["ray"].append(time.perf_counter() - began)
        with tempfile.TemporaryDirectory() as scratch:
            began = time.perf_counter()
            commands = [[*alone, "--seed", str(seed), "--out", f"{scratch}/{seed}"] for seed in range(8)]
            running: list[subprocess.Popen[bytes]] = []
            while commands or running:
                while commands and len(running) < 2:
                    running.append(subprocess.Popen(commands.pop(0), stdout=subprocess.DEVNULL))
                running = [process for process in running if process.poll() is None]
                time.sleep(0.02)
            seconds["processes"].append(time.perf_counter() - began)
    ratios = [ray / own for ray, own in zip(seconds["ray"], seconds["processes"], strict=True)]
    found = {name: statistics.median(times) for name, times in seconds.items()}
    return {**found, "cost": statistics.median(ratios) - 1, "all": seconds}


class Dozing:
    """Clients whose batches take 30 ms each, and no core."""

    def __init__(self) -> None:
        self.sizes: Sequence[int] = [1] * CLIENTS

    def batch(self, client: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(0.03)
        return torch.ones(len(positions), 4), torch.zeros(len(positions), dtype=torch.long)


def many(updates: int, actors: int = 16) -> dict[str, Any]:
    """The share of their time that actors are at work, where blocks are narrower than there are actors."""
    module, data = nn.Linear(4, 2), Dozing()
    found = {}
    with cluster(actors // 2, actors // 2):
        trainer = RayTrainer(module, data, parts()["local"], 0, training=Training("loop"))
        while any(seat.hello is not None for seat in trainer.crew.seats):
            trainer.crew.collect(None)
        for name, eager in (("warm", True), ("early", True), ("late", False)):
            trainer.eager = eager
            simulator = assemble(
                afield.FedAsync(), module, data, stop=Stop(updates=updates), by=trainer, **parts()
            )
            rate, _, _ = timed(simulator, updates)
            found[name] = rate * 0.03 / actors
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=["training", "sweep", "many"])
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        again = [sys.executable, __file__, "--inside", *sys.argv[1:]]
        sys.exit(in_own_network(again, seconds=1800, capture=False).returncode)
    jobs: dict[str, Any] = {
        "training": lambda: training(*((100, 2) if options.quick else (500, 9))),
        "sweep": lambda: sweep(*((500, 1) if options.quick else (5_000, 3))),
        "many": lambda: many(200 if options.quick else 800),
    }
    found = {}
    for name, job in jobs.items():
        if options.only in (None, name):
            found[name] = job()
            print(name, found[name], flush=True)
    print(json.dumps({**found, "torch": torch.__version__, "cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
