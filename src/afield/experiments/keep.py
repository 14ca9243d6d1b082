"""Runs that can be stopped and taken up: when snapshots are taken, what they hold, how a run goes on from one.

A run's folder has a `store` while it is unfinished: the lock of the process that works on it, and snapshots of all
that changes. Runs that are trained in common blocks have one store for all, since their bits depend on each other's.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
import signal
import threading
import time
import tomllib
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from torch import nn

from afield.core.errors import InputError
from afield.core.flat import Layout
from afield.core.types import Receipt
from afield.experiments.config import FORMAT as CONFIG_FORMAT
from afield.experiments.config import Config, Saving, config
from afield.experiments.costs import Tally
from afield.experiments.folder import CONFIG, START, STORE, SUMMARY, RunFolder, new_folder
from afield.runtimes.picture import kinds, picture, restore
from afield.runtimes.rows import Measurement
from afield.runtimes.simulator import Simulator
from afield.store.owner import Owner
from afield.store.pack import DamagedError
from afield.store.snapshot import Snapshots

FORMAT = 1  # of what a snapshot of runs holds
SHARE = 0.03  # of the time: snapshots by the clock are so rare that they take no more

log = logging.getLogger("afield")


class StoppedError(Exception):
    """The user asked to stop, and all is saved. The message says how to go on."""


class Asking:
    """Turns Ctrl-C (and SIGTERM) into a wish to stop at the next event; the second one stops at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # signals reach no other
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def stoppable(command: str) -> Generator[Asking]:
    """Let Ctrl-C stop what goes on inside; whoever hears of it is told the command that goes on."""
    try:
        with Asking() as asking:
            yield asking
    except StoppedError:
        raise StoppedError(f"stopped, all is saved; go on by: {command}") from None
    except KeyboardInterrupt:
        raise StoppedError(f"interrupted; go on from the last snapshot by: {command}") from None


class Record:
    """The rows of one run on their way into its folder."""

    def __init__(
        self,
        settings: Config,
        module: nn.Module,
        simulator: Simulator,
        folder: Path,
        together: int,
        people: Mapping[str, Any] | None,
    ) -> None:
        self.settings, self.module, self.simulator, self.folder = settings, module, simulator, folder
        self.people = people
        self.tally = Tally(simulator, together)
        self.into: RunFolder | None = None

    def open(self, found: Mapping[str, Any] | None, again: bool, generation: int = 0) -> None:
        """Begin in a new folder, or go on from what the snapshot of this number holds (None: from the start)."""
        position = None if not again else START if found is None else found["folder"]
        self.into = RunFolder(self.folder, self.settings.toml(), self.settings.runtime.receipts, position)
        self.into.clients(self.people)
        if found is not None:
            restore(self.simulator, found["simulator"])
            self.tally.restore(found["tally"])
        self.simulator.server.keep_tables(self.settings.runtime.table, self.folder / STORE, generation)

    def write(self, row: Receipt | Measurement) -> None:
        assert self.into is not None
        if isinstance(row, Measurement):
            self.into.metric(row.row())
            if row.clients is not None:
                self.into.diagnosis({"version": row.version, "time": row.time, **row.clients})
        else:
            self.tally.add(row)
            self.into.receipt(row)

    def picture(self) -> dict[str, Any]:
        assert self.into is not None
        return {
            "simulator": picture(self.simulator),
            "tally": self.tally.picture(),
            "folder": self.into.position(),
        }

    def close(self, finished: bool) -> None:
        if self.into is None:
            return
        into, self.into = self.into, None
        model = self.module if finished and self.settings.runtime.model else None
        if model is not None:
            Layout.of(model).load(self.simulator.server.model().cpu(), model)
        into.close(model, self.tally.summary() if finished else None)


class Kept:
    """The records of runs that go together, and their snapshots."""

    def __init__(self, records: Sequence[Record], store: Path, rule: Saving) -> None:
        self.records, self.store, self.rule = records, store, rule
        known = {name: kind for record in records for name, kind in kinds(record.simulator).items()}
        self.snapshots = Snapshots(store, known)
        texts = [record.settings.toml() for record in records]
        self.mark = {
            "format": FORMAT,
            "folders": [os.path.relpath(record.folder, store.parent) for record in records],
            "config": hashlib.sha256("\n".join(texts).encode()).hexdigest(),
        }
        self.saved = time.perf_counter()
        self.versions = 0
        self.empty = True  # no snapshot yet
        self.pause = rule.seconds

    def newest(self) -> tuple[dict[int, Any] | None, int]:
        """What the newest snapshot holds, and its number, by the number of the run; a run not in it was finished."""
        found = self.snapshots.newest(self.records[0].settings.runtime.device, self._check)
        return (None, 0) if found is None else (dict(found[0]), found[2])

    def _check(self, mark: Mapping[str, Any]) -> None:
        for name, text in (("format", "were written by another afield"), ("config", f"had another {CONFIG}")):
            if mark.get(name) != self.mark[name]:
                raise InputError(
                    f"the snapshots in {self.store} {text} ({name} {mark.get(name)!r}, here {self.mark[name]!r}): "
                    "go on with what began the run, or start a new one"
                )

    def _versions(self) -> int:
        return sum(record.simulator.server.version for record in self.records)

    @property
    def first(self) -> bool:
        """Whether there is none yet, and shall be: it says which runs go together."""
        return self.empty and self.rule.seconds < math.inf

    def due(self) -> bool:
        if self.rule.versions is not None and self._versions() - self.versions >= self.rule.versions:
            return True
        return time.perf_counter() - self.saved >= self.pause

    def save(self) -> None:
        began = time.perf_counter()
        going = {number: record for number, record in enumerate(self.records) if record.into is not None}
        generation = self.snapshots.write(
            {number: record.picture() for number, record in going.items()}, self.mark
        )
        self.empty = False
        self.saved, self.versions = time.perf_counter(), self._versions()
        cost = self.saved - began
        self.pause = max(self.rule.seconds, cost / SHARE)
        log.debug("snapshot %s in %s: %.0f ms", generation, self.store, 1e3 * cost)


@contextmanager
def kept(records: Sequence[Record], store: Path, again: bool) -> Generator[Kept]:
    """The folders of these runs, open; each run is closed by who finishes it, and the rest here.

    `again`: those that are there go on from the store's newest snapshot, or from their start where there is none.
    """
    places = list(dict.fromkeys([*(record.folder / STORE for record in records), store]))
    done = again and all(finished(record.folder) for record in records)
    if done and not any(place.exists() for place in places):
        raise _nothing(records)
    with ExitStack() as stack:
        for record in records:
            if not again:
                new_folder(record.folder)
        for place in places:
            stack.enter_context(Owner(place))
        if again and all(finished(record.folder) for record in records):
            _remove(places)  # it was killed after its last word
            raise _nothing(records)
        keeping = Kept(records, store, records[0].settings.runtime.snapshots)
        found, generation = keeping.newest() if again else (None, 0)
        for record in records:
            stack.callback(record.close, finished=False)
        for number, record in enumerate(records):
            if number in found if found is not None else not (again and finished(record.folder)):
                record.open(None if found is None else found[number], again, generation)
        keeping.versions = keeping._versions()
        keeping.empty = found is None
        yield keeping
        _remove(places)


def _remove(places: Sequence[Path]) -> None:
    for place in places:
        shutil.rmtree(place, ignore_errors=True)


def _nothing(records: Sequence[Record]) -> InputError:
    return InputError(f"{records[0].folder} is finished: there is nothing to resume")


def finished(folder: Path) -> bool:
    return (folder / SUMMARY).is_file()


def stored(folder: Path) -> Config:
    """The config of a run that is to be taken up: with the method, block limit and threads that it began with."""
    try:
        table = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{folder} holds no run: it has no {CONFIG}; give the folder of a run") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{folder / CONFIG} is not TOML: {error}; restore it from a copy") from None
    check_format(folder / CONFIG, table.get("format"))
    return config(table)


def check_format(file: Path, found: Any) -> None:
    """Raise where a file is of another format, before any of its keys is looked at."""
    if found != CONFIG_FORMAT:
        newer = isinstance(found, int) and found > CONFIG_FORMAT
        remedy = "update afield" if newer else "use the afield that wrote it"
        raise InputError(f"{file} has format {found}, this afield reads {CONFIG_FORMAT}: {remedy}")


def clear(store: Path) -> None:
    """Remove the store of what is finished, left by a process that was killed just before it did."""
    if store.is_dir():
        with suppress(InputError), Owner(store):  # another process may be about to
            shutil.rmtree(store, ignore_errors=True)


def group(store: Path) -> list[str]:
    """The folders of the runs that the newest snapshot of a store is about; none where all of them are finished."""
    if not store.is_dir():
        return []
    snapshots = Snapshots(store, {})
    for generation in reversed(snapshots.generations()):
        with suppress(DamagedError):
            names = list(snapshots.mark(generation)["folders"])
            return [] if all(finished(store.parent / name) for name in names) else names
    return []
