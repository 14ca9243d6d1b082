"""How fast whole simulations train, against the loop that anybody writes: updates per second and ratios in one run.

    python benchmarks/training.py [--quick] [--device cpu|cuda] [--only NAME ...]

On a CPU: the peers' workload (60 examples a client, batch 20) with 50 clients in flight under exponential delays,
where blocks are small. On a GPU: 100 in flight, evaluation on 10,000 examples every 50 versions, and what ordinary
training of one model costs for the same images.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from naive import NaiveTrainer
from torch import Tensor, nn

from afield.core.types import Receipt
from afield.runtimes.simulate import assemble, thread_count, threads
from afield.runtimes.simulator import Simulator
from afield.runtimes.terms import Measuring, Stop
from afield.scenarios.data import ClientData
from afield.scenarios.delays import Constant, Exponential
from afield.scenarios.schedulers import Concurrency
from afield.strategies import FedAsync
from afield.training.choose import Training
from afield.training.evaluate import Evaluate
from afield.training.local import Local
from afield.training.models import Mlp, ResNet18, build


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
    )


@dataclass(frozen=True)
class Workload:
    name: str
    module: Callable[[], nn.Module]
    shape: tuple[int, ...]
    examples: int  # per client
    batch: int
    updates: int
    naive_updates: int
    training: Training = Training()
    test: int = 0


CPU = [
    Workload("mlp", lambda: build(Mlp((200,)), (1, 28, 28), 10, 0), (1, 28, 28), 60, 20, 500, 500),
    Workload("digits-mlp", lambda: build(Mlp((64,)), (64,), 10, 0), (64,), 60, 20, 500, 500),
    Workload("cnn", cnn, (1, 28, 28), 60, 20, 500, 500),
]
FAST = Training("auto", precision="bfloat16", channels_last=True)
GPU = [
    Workload("mlp", CPU[0].module, (1, 28, 28), 600, 20, 6000, 60, test=10_000),
    Workload("cnn", cnn, (1, 28, 28), 600, 20, 3000, 40, test=10_000),
    Workload(
        "resnet18", lambda: build(ResNet18(), (3, 32, 32), 10, 0), (3, 32, 32), 500, 50, 600, 16, FAST, 10_000
    ),
]


def simulator(work: Workload, device: str, method: str, updates: int, delay: Any, flight: int) -> Simulator:
    """A simulation of the workload; method "naive": one client at a time by the loop that anybody writes."""
    draw = torch.Generator().manual_seed(0)
    total = 100 * work.examples
    inputs = torch.randn(total + work.test, *work.shape, generator=draw)
    targets = torch.randint(10, (total + work.test,), generator=draw)
    data = ClientData(inputs[:total], targets[:total], list(torch.arange(total).split(work.examples)))
    torch.manual_seed(0)
    module, local = work.module(), Local(batch=work.batch, rate=0.05)
    sim = assemble(
        FedAsync(0.5),
        module,
        data,
        stop=Stop(updates=updates),
        evaluator=_evaluator(work, module, inputs[total:], targets[total:], device, method)
        if work.test
        else None,
        measuring=Measuring(versions=50 if work.test else None),
        delay=delay,
        scheduler=Concurrency(flight),
        local=local,
        training=Training("loop") if method == "naive" else work.training.by(method),
        device=device,
    )
    if method == "naive":
        if device != "cpu":  # as anybody would: the data lies where the model is
            data.inputs, data.targets = data.inputs.to(device), data.targets.to(device)
            data.parts = [part.to(device) for part in data.parts]
        sim.trainer, sim.block = NaiveTrainer(module, data, local, 0, device=device), 1
    return sim


def _evaluator(
    work: Workload, module: nn.Module, inputs: Tensor, targets: Tensor, device: str, method: str
) -> Evaluate:
    options = (
        {}
        if method == "naive"
        else {"precision": work.training.precision, "channels_last": work.training.channels_last}
    )
    return Evaluate(module, inputs, targets, 10, device=device, **options)


def timed(sim: Simulator, device: str, warm: int) -> tuple[float, float, list[Receipt], Tensor]:
    """Seconds per update after the first `warm` ones, seconds of those, the log, the model."""
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    receipts: list[Receipt] = []
    wait()
    began = start = time.perf_counter()
    for row in sim.rows():
        if isinstance(row, Receipt):
            receipts.append(row)
            if len(receipts) == warm:
                wait()
                start = time.perf_counter()
    wait()
    end = time.perf_counter()
    return (end - start) / (len(receipts) - warm), start - began, receipts, sim.server.model()


def one_model(work: Workload, device: str) -> float:
    """Milliseconds per batch of `work.batch` images of ordinary training of one model, in batches 8 times as large.

    In the same precision and order of memory, as one CUDA graph a step: no launch is waited for.
    """
    module = work.module().to(device, memory_format=torch.channels_last).train()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05)
    inputs = torch.randn(8 * work.batch, *work.shape, device=device).contiguous(
        memory_format=torch.channels_last
    )
    targets = torch.randint(10, (8 * work.batch,), device=device)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            loss = nn.functional.cross_entropy(module(inputs), targets)
        loss.backward()
        optimiser.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 200 * 1e3 / 8


def on_cpu(works: list[Workload], repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for work in works:
        seconds: dict[str, list[float]] = {"naive": [], "auto": []}
        logs, models = {}, {}
        for _ in range(repeats):
            for method in seconds:  # side by side: this machine may not be ours alone
                sim = simulator(work, "cpu", method, work.updates, Exponential(), 50)
                cores = os.cpu_count() or 1
                count = cores if method == "naive" else thread_count(sim.server.size, sim.trainer.method)
                with threads(count):
                    each, _, logs[method], models[method] = timed(sim, "cpu", 0)
                seconds[method].append(each)
                used = sim.trainer.method
        assert logs["auto"] == logs["naive"], "the event logs differ"
        apart = float((models["auto"] - models["naive"]).abs().max())
        ratio = statistics.median(a / b for a, b in zip(seconds["naive"], seconds["auto"], strict=True))
        rates = {method: 1 / statistics.median(each) for method, each in seconds.items()}
        print(
            f"{work.name:12} naive {rates['naive']:8.0f}   afield ({used}) {rates['auto']:8.0f} updates/s   "
            f"{ratio:5.2f}x   models differ by {apart:.1e}, logs equal"
        )
        found[work.name] = {"naive": rates["naive"], "afield": rates["auto"], "method": used, "ratio": ratio}
    return found


def on_gpu(works: list[Workload], scale: float, device: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for work in works:
        per = work.examples // work.batch
        sim = simulator(work, device, "naive", work.naive_updates, Constant(), 100)
        eager = timed(sim, device, 4)[0] / per * 1e3
        row: dict[str, Any] = {"eager_ms": eager}
        for name, delay in (("constant", Constant()), ("exponential", Exponential())):
            sim = simulator(work, device, "graph", int(work.updates * scale), delay, 100)
            warm = int(work.updates * scale) // 3
            each, first, _, _ = timed(sim, device, warm)
            row[name] = {"ms": each / per * 1e3, "ratio": eager / (each / per * 1e3), "first_s": first}
        if work.name == "resnet18":
            row["one_model_ms"] = one_model(work, device)
            row["over_one_model"] = row["constant"]["ms"] / row["one_model_ms"]
        print(work.name, json.dumps(row))
        found[work.name] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    works = [
        work for work in (CPU if given.device == "cpu" else GPU) if not given.only or work.name in given.only
    ]
    if given.device == "cpu":
        found = on_cpu(works, 1 if given.quick else 7)
    else:
        found = on_gpu(works, 0.2 if given.quick else 1.0, given.device)
    about = {"torch": torch.__version__, "python": sys.version.split()[0], "cores": os.cpu_count()}
    if given.device != "cpu":
        about["gpu"] = torch.cuda.get_device_name()
    print(json.dumps({"benchmark": "training", "device": given.device, **about, "found": found}))


if __name__ == "__main__":
    main()
