"""Several runs side by side, their clients trained in common blocks where models and data agree."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path

from afield.core.types import LocalResult, Receipt
from afield.experiments.config import Config
from afield.experiments.folder import STORE
from afield.experiments.keep import Asking, StoppedError, kept
from afield.experiments.kin import Kin
from afield.experiments.run import Prepared, prepare
from afield.runtimes.rows import Measurement
from afield.runtimes.simulate import threads
from afield.runtimes.simulator import Wanted
from afield.training.block import BlockTrainer
from afield.training.deal import joined

# Bytes of models in one common block. On a CPU more gain nothing and leave the caches; a GPU waits after each block,
# and 512 MB are 11 ResNet-18s.
ROOM, ROOM_GPU = 2**29, 2**33


def prepare_all(configs: Sequence[Config]) -> list[Prepared]:
    """The runs, ready to go together: those whose model, local training and data agree share one engine."""
    kin = Kin()
    return [prepare(config, kin) for config in configs]


def run_together(
    runs: Sequence[Prepared],
    folders: Sequence[Path],
    store: Path | None = None,
    *,
    again: bool = False,
    asking: Asking | None = None,
) -> Generator[tuple[int, Receipt | Measurement]]:
    """Run all into new folders, yielding (which run, row) after each row was written.

    Every run goes on until it needs training; then all that wait are trained at once. What comes out is what each
    run gives alone: the same event log, the same models up to rounding. Snapshots of all are taken at such a
    moment, into one `store`; `again` and `asking` are those of `run`.
    """
    records = [run.record(place, len(runs)) for run, place in zip(runs, folders, strict=True)]
    with (
        kept(records, store or folders[0].parent / STORE, again) as keeping,
        threads(max(run.config.runtime.threads or 1 for run in runs)),
    ):
        alive = {n: run.simulator.steps() for n, run in enumerate(runs) if records[n].into is not None}
        results: dict[int, Sequence[LocalResult] | None] = dict.fromkeys(alive)
        while alive:
            waiting: dict[int, Wanted] = {}
            for number, steps in list(alive.items()):
                while number not in waiting:
                    try:
                        row = steps.send(results[number])
                    except StopIteration:
                        del alive[number]
                        records[number].close(finished=True)  # whatever becomes of the others
                        break
                    results[number] = None
                    if isinstance(row, Wanted):
                        waiting[number] = row
                    else:
                        records[number].write(row)
                        yield number, row
            asked = asking is not None and asking.asked
            if alive and (asked or keeping.first or keeping.due()):
                keeping.save()
                if asked:
                    raise StoppedError
            results.update(_trained(runs, waiting))


def _trained(runs: Sequence[Prepared], waiting: dict[int, Wanted]) -> dict[int, Sequence[LocalResult]]:
    """The results of every block that is waited for."""
    found: dict[int, Sequence[LocalResult]] = {}
    shared: dict[BlockTrainer, list[int]] = {}
    for number, wanted in waiting.items():
        trainer = runs[number].simulator.trainer
        if isinstance(trainer, BlockTrainer):
            shared.setdefault(trainer.engine, []).append(number)
        else:
            found[number] = trainer.train(wanted.tasks, wanted.bases, wanted.corrections)
    for engine, numbers in shared.items():
        most = ROOM if engine.device.type == "cpu" else ROOM_GPU
        room = max(1, most // (engine.layout.size * engine.layout.dtype.itemsize))
        while numbers:
            part: list[int] = []
            rows = 0
            while numbers and (not part or rows + len(waiting[numbers[0]].tasks) <= room):
                part.append(numbers.pop(0))
                rows += len(waiting[part[-1]].tasks)
            deals = []
            for number in part:
                wanted, trainer = waiting[number], runs[number].simulator.trainer
                assert isinstance(trainer, BlockTrainer)
                deals.append(trainer.deal(wanted.tasks, wanted.bases, wanted.corrections))
            results = engine.run(joined(deals))
            for number in part:
                count = len(waiting[number].tasks)
                found[number], results = results[:count], results[count:]
    return found
