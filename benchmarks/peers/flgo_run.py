"""FLGo 0.4.4 on the workload; prints one line of JSON.

Runs in the throw-away environment: python flgo_run.py MODEL UPDATES THREADS.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
import time
from importlib import metadata
from typing import Any

import flgo
import workload
from flgo.algorithm import fedasync, fedbuff
from flgo.algorithm.fedbase import BasicClient
from flgo.benchmark.partition import BasicPartitioner
from flgo.benchmark.toolkits.cv.classification import FromDatasetPipe
from flgo.simulator.base import BasicSimulator

# FLGo wants a file that names the data.
CONFIG = """
import torch, workload
train_data = torch.utils.data.TensorDataset(*workload.pool())
test_data = None
def get_model():
    raise NotImplementedError("given to flgo.init")
"""
OPTIONS = {
    "num_rounds": 10**9,  # the end is a number of updates, see `run`
    "num_epochs": 1,
    "batch_size": workload.BATCH,
    "learning_rate": workload.RATE,
    "proportion": workload.CONCURRENCY / workload.CLIENTS,  # of the clients, busy at a time
    "sample": "uniform_available",  # among the idle; plain "uniform" also draws busy ones, and then starts fewer
    "train_holdout": 0.0,  # all 60 examples are for training
    "eval_interval": -1,  # no evaluation, also not at the start
    "load_mode": "mem",  # examples in a list, not behind two views
    "num_parallels": 1,  # with 2 a pool is made anew at every tick, for one client: 1.4 times slower (MLP)
    "gpu": [],
    "no_log_console": True,
    "no_tqdm": True,
    "log_level": "ERROR",
}


class InOrder(BasicPartitioner):  # type: ignore[misc]
    """Client k has the k-th 60 examples."""

    num_clients = workload.CLIENTS

    def __call__(self, data: Any) -> list[list[int]]:
        return [list(part) for part in workload.parts()]

    def __str__(self) -> str:
        return "in-order"


class Exponential(BasicSimulator):  # type: ignore[misc]
    """Exponential delays. FLGo's clock ticks: with a mean of 50 ticks one of 50 clients arrives per tick."""

    def update_client_responsiveness(self, client_ids: list[int], *args: Any, **kwargs: Any) -> None:
        delays = self.random_module.exponential(workload.CONCURRENCY, len(client_ids))
        self.set_variable(client_ids, "latency", [int(delay) for delay in delays])


def algorithm(name: str) -> type:
    """FLGo's algorithm, whose server counts updates.

    Classes of its own, as flgo.init wraps the methods of those that it is given, once more each time.
    """
    module = {"fedasync": fedasync, "fedbuff": fedbuff}[name]

    class Server(module.Server):  # type: ignore[misc, name-defined]
        updates = 0

        def package_handler(self, received_packages: dict[str, Any]) -> Any:
            self.updates += len(received_packages["__cid"])
            return super().package_handler(received_packages)

    # FLGo's fedasync has FedProx clients: another deep copy and a proximal term at every step, 1.3 times as long.
    # The workload is plain SGD, so it gets FLGo's plain client.
    plain = BasicClient if module is fedasync else module.Client
    client = type("Client", (plain,), {})
    return type(name, (), {"Server": Server, "Client": client})


def run(server: Any, updates: int) -> tuple[int, float]:
    """Go on until so many more updates have arrived; how many did (a tick may bring several), and the seconds."""
    before = server.updates
    server.register_exit_condition(lambda server: server.updates >= before + updates)
    began = time.perf_counter()
    server.run()
    return server.updates - before, time.perf_counter() - began


def main() -> None:
    model, updates, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    sys.argv = sys.argv[:1]  # flgo.init reads the command line
    # torch 2.13 refuses a Subset that has a __getitem__ of its own but not this.
    FromDatasetPipe.TaskDataset.__getitems__ = lambda self, indices: [self[index] for index in indices]
    found = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        os.chdir(folder)
        sys.path.insert(0, folder)
        with open("config.py", "w") as file:
            file.write(CONFIG)
        name = flgo.gen_benchmark_from_file("synthetic", "config.py")
        benchmark: Any = importlib.import_module(name)
        benchmark.visualize = lambda *args: None  # would draw 6,000 labels one by one
        flgo.gen_task({"benchmark": {"name": name}, "partitioner": InOrder()}, "task")
        for strategy in ("fedasync", "fedbuff"):  # fedbuff's buffer: 0.1 of the clients, its default
            server = flgo.init(
                "task",
                algorithm(strategy),
                OPTIONS | {"torch_num_threads": threads},
                model=flgo.convert_model(workload.MODELS[model]),
                Simulator=Exponential,
            )
            run(server, workload.WARM)  # FLGo trains at dispatch: this also fills the 50 places
            arrived, seconds = run(server, updates)
            found[strategy] = arrived / seconds
        os.chdir("/")
    print(json.dumps({"updates_per_s": {"flgo": found}, "versions": {"flgo": metadata.version("flgo")}}))


if __name__ == "__main__":
    main()
