"""afield and the naive loop on the workload, in turns; prints one line of JSON.

Runs in afield's own environment: python ours.py MODEL UPDATES, with src and benchmarks on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import workload
from naive import NaiveTrainer

import afield
from afield.runtimes.simulate import assemble, thread_count, threads
from afield.runtimes.terms import Stop
from afield.scenarios.data import ClientData

# Updates after which models are compared. Later rounding has grown: after 300 updates 1 and 2 threads differ by 1e-3
# themselves (fedasync, CNN).
COMPARED = 50
STRATEGIES: dict[str, Any] = {"fedasync": afield.FedAsync(), "fedbuff": afield.FedBuff(size=workload.BUFFER)}


def timed(
    system: str, algorithm: str, updates: int, module: torch.nn.Module, data: ClientData
) -> dict[str, Any]:
    """The simulation alone, as for the peers; "naive": each task trained for itself when its update is due."""
    simulator = assemble(STRATEGIES[algorithm], module, data, stop=Stop(updates=updates), **parts())
    count = os.cpu_count() or 1
    if system == "naive":
        simulator.trainer, simulator.block = NaiveTrainer(module, data, parts()["local"], seed=0), 1
    else:
        count = thread_count(simulator.server.size, simulator.trainer.method)
    with threads(count):
        began = time.perf_counter()
        log = [row for row in simulator.rows() if isinstance(row, afield.Receipt)]
        seconds = time.perf_counter() - began
    return {"rate": updates / seconds, "log": log, "model": simulator.server.model()}


def parts() -> dict[str, Any]:
    """The scenario; everything else stays at afield's defaults."""
    return {
        "scheduler": afield.schedulers.Concurrency(limit=workload.CONCURRENCY),
        "delay": afield.delays.Exponential(),
        "local": afield.Local(batch=workload.BATCH, rate=workload.RATE),
        "seed": 0,
    }


def main() -> None:
    model, updates = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(0)
    module = workload.MODELS[model]()
    data = ClientData(*workload.pool(), [torch.tensor(part) for part in workload.parts()])
    found: dict[str, dict[str, float]] = {"afield": {}, "naive": {}}
    for algorithm in STRATEGIES:
        for count in (COMPARED, workload.WARM, updates):
            fast, slow = (timed(system, algorithm, count, module, data) for system in found)
            if fast["log"] != slow["log"]:
                raise RuntimeError(f"{algorithm}: the event logs of afield and of the naive loop differ")
            if count == COMPARED and not torch.allclose(fast["model"], slow["model"], atol=1e-4):
                raise RuntimeError(f"{algorithm}: the models of afield and of the naive loop differ")
            found["afield"][algorithm], found["naive"][algorithm] = fast["rate"], slow["rate"]
    versions = {"afield": afield.__version__, "torch": torch.__version__}
    print(json.dumps({"updates_per_s": found, "versions": versions}))


if __name__ == "__main__":
    main()
