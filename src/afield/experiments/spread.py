"""The runs of an experiment, one by one, all over a Ray cluster."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from afield.experiments.codec import Table
from afield.experiments.config import Config, Experiment, config
from afield.experiments.folder import SUMMARY
from afield.experiments.keep import Asking, StoppedError
from afield.experiments.run import load_data, prepare, run
from afield.runtimes.ray import spread
from afield.training.choose import choose
from afield.training.models import build

ENVIRONMENT = ("AFIELD_DATA",)  # a node's own processes do not know what was set here


@dataclass(frozen=True)
class Order:
    """A run to be done on some node."""

    table: Table  # names the user's own strategy by its file, which every node has to have
    environment: dict[str, str]


def apart(chosen: Experiment) -> Experiment:
    """The same experiment with runs that each are one process on one node."""
    runs = tuple(replace(run, runtime=replace(run.runtime, name="simulator")) for run in chosen.runs)
    return replace(chosen, runs=runs, sweep=replace(chosen.sweep, together=False))


def run_spread(runs: Sequence[Config], places: Sequence[Path], asking: Asking) -> Generator[tuple[int, str]]:
    """Run all into new folders: (which run, why it ended) after each was written, in the order of their ends.

    Every run takes `runtime.cpus` CPUs of a node (and a GPU, where `runtime.device` asks for one); its folder comes
    back through the object store, so that the nodes need no disk in common. A run that is lost is begun anew, and
    so is, when the experiment is taken up, one that was under way when it was asked to stop.
    """
    known = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    where = runs[0].runtime
    orders = [Order(_table(chosen), known) for chosen in runs]
    gpus = int(where.device != "cpu")
    for number, (ended, files) in spread(
        carry_out, orders, address=where.address, cpus=where.cpus, gpus=gpus, stop=lambda: asking.asked
    ):
        # the summary last: it says that the run is complete
        for name, content in sorted(files.items(), key=lambda file: file[0] == SUMMARY):
            target = places[number] / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        yield number, ended
    if asking.asked:
        raise StoppedError


def carry_out(order: Order) -> tuple[str, dict[str, bytes]]:
    """Do one run here, within the CPUs it was given; why it ended, and the files of its folder."""
    os.environ.update(order.environment)
    chosen = config(order.table)
    cpus = chosen.runtime.cpus
    runtime = replace(chosen.runtime, threads=chosen.runtime.threads or cpus)
    training = chosen.training
    if training.method == "auto":  # by the CPUs of this run, not by those of the machine
        dataset, model, _ = load_data(chosen)
        module = build(model, tuple(dataset.inputs.shape[1:]), dataset.classes, chosen.seed)
        training = training.by(choose(module, runtime.device, cores=cpus))
    prepared = prepare(replace(chosen, runtime=runtime, training=training))
    with tempfile.TemporaryDirectory(prefix="afield-") as scratch:
        folder = Path(scratch) / "run"
        for _ in run(prepared, folder):
            pass
        files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
    return prepared.simulator.ended, files


def _table(chosen: Config) -> Table:
    table = chosen.table()
    path, _, attribute = table["strategy"]["name"].rpartition(":")
    if not path:
        return table
    return {**table, "strategy": {**table["strategy"], "name": f"{Path(path).resolve()}:{attribute}"}}
