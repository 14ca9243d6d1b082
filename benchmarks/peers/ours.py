"""afield and the naive loop on the workload, in turns; prints one line of JSON.

Runs in afield's own environment: python ours.py MODEL UPDATES, with src and benchmarks on PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import workload
from naive import NaiveTrainer

import afield
from afield.core.flat import Layout
from afield.runtimes.simulate import assemble
from afield.runtimes.terms import Stop
from afield.scenarios.data import ClientData

STRATEGIES: dict[str, Any] = {"fedasync": afield.FedAsync(), "fedbuff": afield.FedBuff(size=workload.BUFFER)}


def ours(algorithm: str, updates: int, module: torch.nn.Module, data: ClientData) -> dict[str, Any]:
    """afield.simulate as it comes, set-up of the run included."""
    began = time.perf_counter()
    result = afield.simulate(STRATEGIES[algorithm], module, data, updates=updates, **parts())
    seconds = time.perf_counter() - began
    vector = Layout.of(result.model).flatten(result.model)
    return {"rate": updates / seconds, "log": result.receipts, "model": vector}


def naive(algorithm: str, updates: int, module: torch.nn.Module, data: ClientData) -> dict[str, Any]:
    """The same simulator, but each task trained for itself when its update is due."""
    simulator = assemble(STRATEGIES[algorithm], module, data, stop=Stop(updates=updates), **parts())
    simulator.trainer, simulator.block = NaiveTrainer(module, data, parts()["local"], seed=0), 1
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
        for count in (workload.WARM, updates):  # the first to warm up
            fast, slow = (system(algorithm, count, module, data) for system in (ours, naive))
            if fast["log"] != slow["log"]:
                raise RuntimeError(f"{algorithm}: the event logs of afield and of the naive loop differ")
            # Later rounding has grown: after 300 updates 1 and 2 threads differ by 1e-3 themselves (fedasync, CNN).
            if count == workload.WARM and not torch.allclose(fast["model"], slow["model"], atol=1e-4):
                raise RuntimeError(f"{algorithm}: the models of afield and of the naive loop differ")
            found["afield"][algorithm], found["naive"][algorithm] = fast["rate"], slow["rate"]
    versions = {"afield": afield.__version__, "torch": torch.__version__}
    print(json.dumps({"updates_per_s": found, "versions": versions}))


if __name__ == "__main__":
    main()
