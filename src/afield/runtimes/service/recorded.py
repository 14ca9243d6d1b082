"""A run folder as rows with rising numbers, like those of a live service: all of a finished run, or as it grows.

What is found at one look is put in the order of its time; what a later look finds comes after it, whatever its time:
a running simulation writes measurements at once and shows its receipts at snapshots, so bars come after the curve.
A run that was taken up again was cut back first: then a row "reset" says that all before it is void, and everything
that is there follows anew.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from afield.core.errors import InputError
from afield.runtimes.service.events import KEPT, Row
from afield.runtimes.service.shares import Shares, rule_of
from afield.strategies import STRATEGIES

log = logging.getLogger(__name__)
LOOK = 0.4  # seconds between two looks at a folder that may grow
STOPS = 200  # moments of a file of receipts at which shares are told
# In this order at one moment: an arrival, what it led to, and the client's next task.
RECEIPT, MEASUREMENT, SHARES, TASK, RESET = range(5)
KINDS = ("receipt", "measurement", "shares", "task", "reset")
COLUMNS = (
    "number",
    "client",
    "base",
    "started",
    "arrived",
    "examples",
    "staleness",
    "weight",
    "stepped",
    "version",
)


class Recorded:
    """The rows of one folder. Memory: about 100 bytes per receipt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = _config(folder / "config.toml")
        strategy = self.config.get("strategy", {})
        self.rule = rule_of(STRATEGIES.get(strategy.get("name", "fedbuff")))
        self.clients = int(self.config.get("scenario", {}).get("clients", 0))
        self.codes = np.empty(0, dtype=np.int64)  # by row: place in its list, times 8, and kind
        self.void = 0  # rows before this place are of a past that was cut off
        self._forget()
        self.look()

    def _forget(self) -> None:
        self.measured: list[dict[str, Any]] = []
        self.shared: list[dict[str, Any]] = []
        self.shares = Shares(self.rule, self.clients)
        self.columns: dict[str, Any] = {name: np.empty(0) for name in COLUMNS}
        self.refused: dict[int, str] = {}  # by receipt, where it was
        self._read, self._tail = 0, b""  # bytes of the metrics, and the last line of them
        self._files: dict[str, tuple[int, int, int]] = {}
        self._seen: tuple[int, int, int] | None = None  # the part that was read last,
        self._known = 0  # and how many of its receipts

    # -- what is told -----------------------------------------------------------------------------------------

    @property
    def last(self) -> int:
        return len(self.codes)

    def after(self, number: int, most: int = KEPT, first: bool = False) -> list[Row]:
        number = max(number, self.void)
        end = min(number + most, self.last) if first else self.last
        start = number if first else max(number, self.last - most)
        return [self._row(place) for place in range(start, end)]

    async def news(self, after: int, seconds: float) -> list[Row]:
        """The rows after this one, not too many at a time; waits for some, at most so long."""
        end = time.monotonic() + seconds
        while self.last <= after:
            await asyncio.sleep(LOOK)
            self.look()
            if time.monotonic() > end:
                break
        return self.after(after, 5000, first=True)

    def _row(self, place: int) -> Row:
        index, kind = divmod(int(self.codes[place]), 8)
        values: Mapping[str, Any] = {}
        if kind == MEASUREMENT:
            values = self.measured[index]
        elif kind == SHARES:
            values = self.shared[index]
        elif kind == RECEIPT:
            values = {name: self.columns[name][index].item() for name in COLUMNS}
            values["refused"] = self.refused.get(index, "")
        elif kind == TASK:
            names = (("number", "number"), ("client", "client"), ("base", "version"), ("started", "started"))
            values = {to: self.columns[name][index].item() for name, to in names}
        name = "refusal" if kind == RECEIPT and index in self.refused else KINDS[kind]
        return Row(place + 1, name, values)

    def status(self) -> dict[str, Any]:
        """As of a live service, with where the run begins and ends."""
        finished = (self.folder / "summary.json").exists()
        arrived, last = self.columns["arrived"], self.measured[-1] if self.measured else {}
        times = [float(last.get("time", 0.0)), *map(float, arrived[-1:])]
        return {
            "name": self.config.get("label", self.folder.name),
            "strategy": self.config.get("strategy", {}),
            "state": "finished" if finished else "running",
            "clock": "real" if self.config.get("runtime", {}).get("name") == "service" else "virtual",
            "version": max([int(last.get("version", 0)), *map(int, self.columns["version"][-1:])]),
            "updates": max(int(last.get("updates", 0)), len(arrived) - len(self.refused)),
            "refusals": {},
            "tasks": None,
            "waiting": None,
            "clients": self.clients,
            "now": max(times),
            "rows": self.last,
            "accuracy": last.get("accuracy"),
            "loss": last.get("loss"),
            "privacy": None if "epsilon" not in last else {"epsilon": last["epsilon"]},
        }

    # -- what is read -----------------------------------------------------------------------------------------

    def look(self) -> None:
        """Read what has come since the last look."""
        if self._cut():
            self._forget()
            self.void = self.last
            self.codes = np.append(self.codes, RESET)
        times: list[Any] = []
        codes: list[Any] = []
        if measured := self._new_measurements():
            times.append([float(row["time"]) for row in measured])
            codes.append(np.arange(len(self.measured), len(self.measured) + len(measured)) * 8 + MEASUREMENT)
            self.measured.extend(measured)
        for when, what in (*map(self._whole, self._new_files()), self._part()):
            times.extend(when)
            codes.extend(what)
        if codes:
            new = np.concatenate(codes).astype(np.int64)
            order = np.lexsort((new // 8, new % 8, np.concatenate(times)))
            self.codes = np.concatenate([self.codes, new[order]])

    def _cut(self) -> bool:
        """Whether something that was read is not there any more: the run was taken up again."""
        for name, mark in self._files.items():
            if _mark(self.folder / "receipts" / name) != mark:
                return True
        if not self._read:
            return False
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:
                file.seek(self._read - len(self._tail))
                return file.read(len(self._tail)) != self._tail
        except OSError:
            return True

    def _new_measurements(self) -> list[dict[str, Any]]:
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except OSError:
            return []  # stopped before its first evaluation
        whole = data[: data.rfind(b"\n") + 1]  # the rest is being written
        rows = []
        for line in whole.splitlines(keepends=True):
            self._tail = line
            self._read += len(line)
            try:
                row = json.loads(line)
                float(row["time"])
            except (ValueError, KeyError, TypeError):
                log.warning("%s/metrics.jsonl has a line that is no measurement: left out", self.folder)
                continue
            rows.append(row)
        return rows

    def _new_files(self) -> list[Path]:
        files = sorted((self.folder / "receipts").glob("*.parquet"))
        return [file for file in files if file.name not in self._files]

    def _whole(self, file: Path) -> tuple[list[Any], list[Any]]:
        """A file of receipts that is complete; some of it may be known already from its part."""
        mark = _mark(file)
        if mark is None or (table := _table(file)) is None:
            return [], []  # it is being written, or was just removed: the next look knows more
        self._files[file.name] = mark
        known, self._known = self._known, 0
        return self._receipts(table.slice(known))

    def _part(self) -> tuple[list[Any], list[Any]]:
        """What a running simulation shows of its next file, from time to time: it only grows."""
        file = self.folder / "receipts" / f"{len(self._files):05d}.part"
        mark = _mark(file)
        if mark is None or mark == self._seen or (table := _table(file)) is None or len(table) <= self._known:
            return [], []
        self._seen = mark
        known, self._known = self._known, len(table)
        return self._receipts(table.slice(known))

    def _receipts(self, table: Any) -> tuple[list[Any], list[Any]]:
        """Add receipts; their tasks, arrivals and shares by time."""
        first = len(self.columns["number"])
        new = {name: table.column(name).to_numpy() for name in COLUMNS}
        for place, why in enumerate(table.column("refused").to_pylist()):
            if why:
                self.refused[first + place] = why
        for name in COLUMNS:
            self.columns[name] = new[name] if not first else np.concatenate([self.columns[name], new[name]])
        places = np.arange(first, first + len(table)) * 8
        times, codes = [new["started"], new["arrived"]], [places + TASK, places + RECEIPT]
        before = len(self.shared)
        stops = self._share(new, first)
        times.append(np.array(stops))
        codes.append(np.arange(before, before + len(stops)) * 8 + SHARES)
        return times, codes

    def _share(self, new: Mapping[str, Any], first: int) -> list[float]:
        """Follow the shares through new receipts; they are told at moments that are evenly apart."""
        names = ("client", "weight", "stepped", "version", "arrived")
        columns = [new[name].tolist() for name in names]
        count = len(columns[0])
        every = max(1, count // STOPS)
        stops = []
        for place, (client, weight, stepped, version, arrived) in enumerate(zip(*columns, strict=True)):
            if first + place not in self.refused:
                self.shares.add(client, weight, stepped, version)
            if place % every == every - 1 or place == count - 1:
                self.shared.append(self.shares.told())
                stops.append(arrived)
        return stops


def _table(file: Path) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.read_table(file, columns=[*COLUMNS, "refused"])
    except (OSError, pa.ArrowException):
        return None


def _mark(file: Path) -> tuple[int, int, int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _config(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{file} is missing: {file.parent} is no run folder; give one that afield run made"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
