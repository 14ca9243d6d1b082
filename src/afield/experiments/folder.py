"""A run folder: all that `report`, `compare` and `resume` need. Written as the run goes, never overwritten."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch import nn

from afield.core.errors import InputError
from afield.core.types import Receipt
from afield.experiments.tracking import Trackers
from afield.store.files import DRAFT, named, whole

SUMMARY = "summary.json"
CONFIG = "config.toml"
STORE = "store"  # snapshots and the owner's lock, while the run is unfinished (experiments/keep.py)
EXPERIMENT = "experiment.toml"  # the plan of all runs, in the folder of an experiment
ENVIRONMENT, METRICS, DIAGNOSTICS = "environment.json", "metrics.jsonl", "diagnostics.jsonl"
CLIENTS = "clients.json"
MODEL = "model.safetensors"
START: Mapping[str, Any] = {"sizes": {METRICS: 0, DIAGNOSTICS: 0}, "files": 0, "rows": None}
ROWS = 50_000  # receipts per file
log = logging.getLogger("afield")
_TENSORS = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}
_KINDS = {"int": "int64", "float": "float64", "bool": "bool_", "str": "string"}


class RunFolder:
    """Writes receipts, metrics and the model into a new folder, or into one that is taken up again.

    `again` is the position from which that one goes on: whatever was written after it is cut off.
    """

    def __init__(
        self, path: Path, config: str, receipts: bool = True, again: Mapping[str, Any] | None = None
    ) -> None:
        self.path = path
        self._trackers = Trackers(path, config)  # before anything is made: what it asks for may be missing
        self._keeps = receipts
        self._rows: list[Receipt] = []
        self._files = 0
        if again is None:
            new_folder(path)
        else:
            path.mkdir(parents=True, exist_ok=True)
            self._cut(again)
        if not (path / CONFIG).exists():  # the first file: what has none never began
            write_whole(path / CONFIG, config)
        if not (path / ENVIRONMENT).exists():
            write_whole(path / ENVIRONMENT, json.dumps(environment(), indent=2) + "\n")
        elif again is not None:
            _warn(path)
        with named(path, "write to"):
            if receipts:
                (path / "receipts").mkdir(exist_ok=True)
            self._metrics = (path / METRICS).open("a", encoding="utf-8")
        self._trackers.open()

    def position(self) -> dict[str, Any]:
        """How far the files are, all of it on the disk; what is not in a file yet is told whole."""
        sizes = {}
        with named(self.path, "write to"):
            self._metrics.flush()
            for name in (METRICS, DIAGNOSTICS):
                sizes[name] = _synced(self.path / name) if (self.path / name).exists() else 0
            self._show()
        return {"sizes": sizes, "files": self._files, "rows": columns(self._rows)}

    def _cut(self, position: Mapping[str, Any]) -> None:
        for name in (SUMMARY, MODEL):
            (self.path / name).unlink(missing_ok=True)
        for file in (self.path / "receipts").glob("*"):
            if not file.stem.isdecimal() or int(file.stem) >= position["files"]:
                file.unlink()
        for number in range(position["files"]):
            if not (self.path / "receipts" / f"{number:05d}.parquet").is_file():
                raise InputError(
                    f"{self.path}/receipts/{number:05d}.parquet is missing: restore it from a copy"
                )
        for name, size in position["sizes"].items():
            file = self.path / name
            there = file.stat().st_size if file.exists() else 0
            if there < size:
                raise InputError(
                    f"{file} has {there} bytes where its snapshot knows of {size}: restore it from a copy"
                )
            if there > size:
                os.truncate(file, size)
        self._files = position["files"]
        self._rows = [] if position["rows"] is None else receipts_of(position["rows"])

    def clients(self, people: Mapping[str, Any] | None) -> None:
        """Who has which data and how slow (experiments/people.py); a run with too many clients tells nothing."""
        if people is not None:
            write_whole(self.path / CLIENTS, json.dumps(people) + "\n")

    def receipt(self, receipt: Receipt) -> None:
        if self._keeps:
            self._rows.append(receipt)
        if len(self._rows) == ROWS:
            self._flush()

    def metric(self, row: Mapping[str, Any]) -> None:
        with named(self.path / METRICS, "write"):
            self._metrics.write(json.dumps(row) + "\n")
            self._metrics.flush()  # `compare` and a curious user may read along
        self._trackers.row(row)

    def diagnosis(self, row: Mapping[str, Any]) -> None:
        """What was found of each client at a measurement: lists too long for the metrics."""
        path = self.path / DIAGNOSTICS
        with named(path, "write"), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def close(self, module: nn.Module | None, summary: Mapping[str, Any] | None = None) -> None:
        """Finish: the summary is written last, so its presence says that the run is complete."""
        try:
            if self._keeps:
                self._flush()
        finally:
            with named(self.path / METRICS, "write"):
                self._metrics.close()
        if module is not None:
            from safetensors.torch import save

            # Tied weights are written under each of their names: the format knows no shared ones.
            own = {id(parameter): name for name, parameter in module.named_parameters()}
            state = {
                name: value.detach().contiguous()
                if own.get(id(value), name) == name
                else value.detach().clone()
                for name, value in module.state_dict(keep_vars=True).items()
            }
            with named(self.path / MODEL, "write"):
                # save_file's draft has a random name: a kill would leave it
                whole(self.path / MODEL, save(state))
        if summary is not None:
            told = {**summary, "afield": package_version("afield")}
            write_whole(self.path / SUMMARY, json.dumps(told, indent=2) + "\n")
        self._trackers.close(summary)

    def _show(self) -> None:
        """The receipts of no file yet, for who follows the run (`afield watch`); `resume` does not need them."""
        if self._rows:
            write_receipts(self._rows, self._part)

    @property
    def _part(self) -> Path:
        return self.path / "receipts" / f"{self._files:05d}.part"

    def _flush(self) -> None:
        if not self._rows and self._files:
            return
        file = self.path / "receipts" / f"{self._files:05d}.parquet"
        with named(file, "write"):
            write_receipts(self._rows, file)
            _synced(file)
            self._part.unlink(missing_ok=True)
        self._files += 1
        self._rows.clear()


def write_receipts(rows: Sequence[Receipt], path: Path) -> None:
    """One file of the log; who is killed half-way leaves none that cannot be read."""
    import pyarrow as pa  # here: machines that only simulate from Python need no pyarrow
    from pyarrow import parquet

    found = {}
    for column in fields(Receipt):
        kind = getattr(pa, _KINDS[str(column.type)])()
        found[column.name] = pa.array([getattr(row, column.name) for row in rows], kind)
    draft = path.with_suffix(DRAFT)
    parquet.write_table(pa.table(found), draft)
    os.replace(draft, path)


def columns(rows: Sequence[Receipt]) -> dict[str, Any]:
    """Receipts as a snapshot keeps them: a tensor per field, and the few texts by row."""
    found: dict[str, Any] = {}
    for column in fields(Receipt):
        values = [getattr(row, column.name) for row in rows]
        if column.type == "str":
            found[column.name] = {number: text for number, text in enumerate(values) if text}
        else:
            found[column.name] = torch.tensor(values, dtype=_TENSORS[str(column.type)])
    return found


def receipts_of(found: Mapping[str, Any]) -> list[Receipt]:
    """The receipts of such columns."""
    count = len(found["number"])
    parts = []
    for column in fields(Receipt):
        values = found[column.name]
        parts.append([values.get(n, "") for n in range(count)] if column.type == "str" else values.tolist())
    return [Receipt(*row) for row in zip(*parts, strict=True)]


def write_whole(path: Path, text: str, alone: bool = True) -> None:
    """Write a file that is there as a whole or not at all; not `alone`: others may write it at that moment."""
    with named(path, "write"):
        # alone, a draft that was left is written over
        whole(path, text.encode(), mark="" if alone else f".{os.getpid()}-{get_ident()}")


def _synced(path: Path) -> int:
    """Wait until a file is on the disk; gives its size."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def check_new(path: Path) -> None:
    """Raise if a run would write over something (a plan, and the lock of who begins it, are nothing yet)."""
    fine = (EXPERIMENT, STORE)
    if path.exists() and (not path.is_dir() or any(entry.name not in fine for entry in path.iterdir())):
        raise InputError(f"{path} exists and is never overwritten: choose another --out, or remove it")


def new_folder(path: Path) -> None:
    """Make a folder that must not be there yet."""
    check_new(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be made: {error.strerror}; choose another --out") from error


def environment() -> dict[str, Any]:
    """What a run ran on."""
    names = ("afield", "torch", "numpy", "scikit-learn", "pyarrow", "safetensors")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "packages": {name: package_version(name) for name in names},
        "cuda": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def _warn(path: Path) -> None:
    """Say so where a run goes on with other code than it began with: only the same code gives the same bits."""
    try:
        before = json.loads((path / ENVIRONMENT).read_text(encoding="utf-8"))["packages"]
    except (OSError, ValueError, KeyError):
        return
    for name in ("afield", "torch"):
        if before.get(name) != (now := package_version(name)):
            text = "%s began with %s %s and goes on with %s: its bits may differ"
            log.warning(text, path, name, before.get(name), now)


def slug(label: str) -> str:
    """A label as the name of a folder."""
    name = "".join(letter if letter.isalnum() or letter in "-_.=" else "-" for letter in label)
    return name if name.strip(".") else "run"  # neither nothing, nor "..", which is another folder


def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
