"""Live progress: a bar per run on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from afield.cli.screen import screen
from afield.core.types import Receipt
from afield.experiments.config import Config
from afield.runtimes.rows import Measurement
from afield.runtimes.terms import Stop

REFRESH = 0.1  # seconds between redraws: drawing every receipt would cost more than the run
LINES = 5  # plain lines per run


@dataclass(slots=True)
class _State:
    """What was last heard of one run."""

    began: float
    shown: int = 0
    updates: int = 0
    staleness: float = 0.0
    accuracy: float | None = None


class Progress:
    """Shows the rows of runs as they come."""

    def __init__(self, runs: Sequence[Config]) -> None:
        self._live = sys.stdout.isatty()
        self._bars = Bars(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=10),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(compact=True),
            console=screen(),
            disable=not self._live,
        )
        several = len({run.seed for run in runs}) > 1
        self._names = {id(run): f"{run.label} {run.seed}" if several else run.label for run in runs}
        width = max(len(name) for name in self._names.values())
        self._names = {key: name.ljust(width) for key, name in self._names.items()}
        self._tasks: dict[int, TaskID] = {
            id(run): self._bars.add_task(escape(self._names[id(run)]), total=1.0, state="", start=False)
            for run in runs
        }
        self._drawn = 0.0
        self._states: dict[int, _State] = {}

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show(self, config: Config, row: Receipt | Measurement) -> None:
        if id(config) not in self._states:  # several may go on at once
            self._states[id(config)] = _State(time.perf_counter())
            self._bars.start_task(self._tasks[id(config)])
        state = self._states[id(config)]
        if isinstance(row, Measurement):
            state.accuracy = row.values.get("accuracy", state.accuracy)
            now, state.updates = row.time, row.updates
        else:
            state.staleness += 0.02 * (row.staleness - state.staleness)
            now, state.updates = row.arrived, state.updates + (not row.refused)
        moment = time.perf_counter()
        if moment - self._drawn < REFRESH and not isinstance(row, Measurement):
            return
        self._drawn = moment
        share = _share(config.stop, now, state.updates, row.version)
        rate = row.version / max(moment - state.began, 1e-6)
        words = ("v", "stale", "acc") if self._live else ("version", "staleness", "accuracy")
        text = f"t {now:.1f}  {words[0]} {row.version} ({rate:.0f}/s)  {words[1]} {state.staleness:.1f}"
        if state.accuracy is not None:
            text += f"  {words[2]} {100 * state.accuracy:.1f} %"
        self._bars.update(self._tasks[id(config)], completed=share, state=text)
        if not self._live and share * LINES >= state.shown + 1:
            state.shown = int(share * LINES)
            print(f"{self._names[id(config)]}  {100 * share:3.0f} %  {text}", flush=True)

    def done(self, config: Config, ended: str) -> None:
        self._bars.update(self._tasks[id(config)], completed=1.0)
        if ended not in ("time", "updates", "versions", "accuracy"):
            self._bars.console.print(f"{config.label}: ended early, {ended}", markup=False)


def _share(stop: Stop, now: float, updates: int, version: int) -> float:
    """How much of the run is done, by the bound that is nearest."""
    shares = [0.0]
    if stop.time is not None:
        shares.append(now / stop.time)
    if stop.updates is not None:
        shares.append(updates / stop.updates)
    if stop.versions is not None:
        shares.append(version / stop.versions)
    return min(1.0, max(shares))
