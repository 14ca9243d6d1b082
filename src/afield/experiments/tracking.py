"""What a run measures, told to trackers as it comes.

The run folder stays the truth: a row is in metrics.jsonl before any tracker hears of it, and trackers.json there
says how many rows each has taken. So a tracker that fails or hangs is dropped with a warning and never costs a run;
whoever opens the folder again (a resumed run, `afield track`) sends what is missing, and nothing twice.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import tomllib
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from afield.core.errors import InputError
from afield.experiments.trackers import TRACKERS, Log, Told, Tracker, check

MEMORY = "trackers.json"
# trackers that did not answer, with their uri: waited for only once
_MUTE: set[tuple[str, str | None]] = set()

log = logging.getLogger("afield")


class Trackers:
    """All trackers of one run, each on a thread of its own: none can hold up the run or another."""

    def __init__(self, folder: Path, text: str, log: Log | None = None) -> None:
        """`log`: in place of the config's own."""
        table = tomllib.loads(text).get("log", {})
        log = log or Log(**{**table, "to": tuple(table.get("to", ()))})
        check(log)
        self._log, self._folder, self._text = log, folder, text
        self._lines: list[_Line] = []
        self._number = 0

    def open(self) -> None:
        """Begin in a folder that is there: each tracker first takes the rows that it has not had."""
        if not self._log.to:
            return
        metrics = self._folder / "metrics.jsonl"
        with metrics.open(encoding="utf-8") as file:
            rows = [
                json.loads(line) for line in file if line.endswith("\n")
            ]  # a killed run may end in a torn one
        memory = _Memory(self._folder / MEMORY)
        told = Told(self._folder, self._text, self._log)
        self._lines = [
            _Line(name, told, memory) for name in self._log.to if (name, self._log.uri) not in _MUTE
        ]
        if mute := [name for name in self._log.to if (name, self._log.uri) in _MUTE]:
            log.warning("%s is not told of %s: it did not answer before", ", ".join(mute), self._folder)
        for row in rows:
            self.row(row)

    def row(self, row: Mapping[str, Any]) -> None:
        for line in self._lines:
            line.put(self._number, row)
        self._number += 1

    def close(self, summary: Mapping[str, Any] | None) -> list[str]:
        """The end of the run, or of its interruption; gives the trackers that did not get everything."""
        for line in self._lines:
            line.end(summary)
        failed = [line.name for line in self._lines if not line.finished(self._log.patience)]
        self._lines = []
        return failed


class _Memory:
    """trackers.json: what each tracker needs to go on with the same run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, Any]] = {}
        if path.exists():
            self._known = json.loads(path.read_text(encoding="utf-8"))

    def of(self, name: str, place: str) -> dict[str, Any]:
        if self._known.get(name, {}).get("place") != place:
            self._known[name] = {"place": place, "rows": 0, "done": False}
        return self._known[name]

    def save(self) -> None:
        with self._lock:
            draft = self._path.with_name(f".{self._path.name}.draft")
            draft.write_text(json.dumps(self._known, indent=1) + "\n", encoding="utf-8")
            os.replace(draft, self._path)


class _Line:
    """One tracker at work."""

    def __init__(self, name: str, told: Told, memory: _Memory) -> None:
        self.name = name
        self._told, self._memory = told, memory
        self._known = memory.of(name, TRACKERS[name].place(told.log))
        self._waiting: SimpleQueue[tuple[int, Mapping[str, Any] | None]] = SimpleQueue()
        self._failed = False
        self._thread = threading.Thread(target=self._work, name=f"afield {name}", daemon=True)
        self._thread.start()

    def put(self, number: int, row: Mapping[str, Any]) -> None:
        self._waiting.put((number, row))

    def end(self, summary: Mapping[str, Any] | None) -> None:
        self._waiting.put((-1, summary))

    def finished(self, patience: float) -> bool:
        self._thread.join(patience)
        if self._thread.is_alive():
            self._failed = True  # its thread may still wait; that ends with the process
            _MUTE.add((self.name, self._told.log.uri))
            self._warn(f"did not answer within {patience:g} s")
        return not self._failed

    def _work(self) -> None:
        if self._known["done"]:
            return  # it has all of this run
        try:
            tracker: Tracker = TRACKERS[self.name](self._told, self._known)
            self._memory.save()
            while (item := self._waiting.get())[0] >= 0:
                number, row = item
                if number >= self._known["rows"]:
                    assert row is not None
                    tracker.row(number, row)
                    self._known["rows"] = number + 1
                    self._memory.save()
            tracker.close(item[1])
            self._known["done"] = item[1] is not None
            self._memory.save()
        except Exception as error:  # whatever it is, the run matters more
            if not self._failed:
                self._failed = True
                self._warn(" ".join(f"{type(error).__name__}: {error}".split()))

    def _warn(self, reason: str) -> None:
        log.warning(
            "%s was dropped: %s. The run is not affected; send what is missing later: afield track %s --to %s",
            *(self.name, reason, self._told.folder, self.name),
        )


def send(folder: Path, log: Log) -> list[str]:
    """Send a run folder to trackers, whatever of it they do not have; gives those that did not get everything."""
    try:
        text = (folder / "config.toml").read_text(encoding="utf-8")
        done = folder / "summary.json"
        summary = json.loads(done.read_text(encoding="utf-8")) if done.is_file() else None
    except OSError as error:
        raise InputError(
            f"{error.filename} cannot be read: {error.strerror}; give the folder of a run"
        ) from None
    trackers = Trackers(folder, text, log)
    trackers.open()
    return trackers.close(summary)
