"""Run folders, read back. Nothing here needs the code that made them: a folder is all there is to know."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DEPTH = 2  # how far below a given folder run folders are looked for: sweep/label/seed

# The columns of receipts/*.parquet, spelled out because reports do not import the core.
RECEIPTS = pa.schema(
    [
        ("number", pa.int64()),
        ("client", pa.int64()),
        ("base", pa.int64()),
        ("started", pa.float64()),
        ("arrived", pa.float64()),
        ("examples", pa.int64()),
        ("bytes", pa.int64()),
        ("staleness", pa.int64()),
        ("weight", pa.float64()),
        ("stepped", pa.bool_()),
        ("version", pa.int64()),
        ("hold", pa.bool_()),
        ("refused", pa.string()),
    ]
)
_POSITIONS = ("time", "wall", "version", "updates")  # where an evaluation stands; every row has them
# What seeds of one label may differ in: the seed, and what a machine decides.
_FREE = ("seed", "format", "runtime", "log")
_FREE_TRAINING = ("method", "channels_last", "compile")


class LoadError(ValueError):
    """What is on disk is no run, or a broken one. The message names the file."""


@dataclass(frozen=True)
class Run:
    """One run, as its folder tells it."""

    folder: Path
    label: str
    seed: int
    config: dict[str, Any]
    metrics: list[dict[str, Any]]  # one row per evaluation, in order
    finished: bool  # its summary was written, the last thing that a run does
    summary: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def receipts(self) -> pa.Table:
        """The whole log, one row per update. Read when first asked for: it may be millions of rows."""
        return self.columns(RECEIPTS.names)

    def columns(self, names: Sequence[str]) -> pa.Table:
        """Some columns of the log, without reading the others."""
        files = sorted((self.folder / "receipts").glob("*.parquet"))
        if files:
            parts = [_read_part(file, names) for file in files]
            return pa.concat_tables(parts, promote_options="permissive")
        if self.finished and self.config.get("runtime", {}).get("receipts", True):
            raise LoadError(f"{self.folder / 'receipts'} has no *.parquet file")
        # Receipts are written in parts, so a young run has none yet.
        return RECEIPTS.empty_table().select(list(names))

    @cached_property
    def diagnostics(self) -> list[dict[str, Any]]:
        """What was found of each client at each evaluation (measure.diagnose); empty where nothing was recorded."""
        file = self.folder / "diagnostics.jsonl"
        return list(_read_rows(file, self.finished, ("version", "time"))) if file.is_file() else []

    @cached_property
    def clients(self) -> dict[str, Any]:
        """What was known of each client before the run: examples, duration, labels; empty where not recorded."""
        return _read_object(self.folder / "clients.json") or {}

    @cached_property
    def environment(self) -> dict[str, Any]:
        """What the run ran on; empty where not recorded."""
        return _read_object(self.folder / "environment.json") or {}

    def series(self, key: str) -> list[dict[str, Any]]:
        """The evaluations that have a number at `key`."""
        return [row for row in self.metrics if isinstance(row.get(key), int | float)]


def load(folder: str | Path) -> Run:
    """The run in `folder`. A run that was stopped, or still goes on, loads with `finished=False`."""
    folder = Path(folder)
    config = _read_config(folder / "config.toml")
    summary = _read_object(folder / "summary.json")
    finished = summary is not None
    metrics = list(_read_rows(folder / "metrics.jsonl", finished, _POSITIONS))
    return Run(folder, config["label"], config["seed"], config, metrics, finished, summary or {})


def find(paths: Iterable[str | Path]) -> list[Run]:
    """Every run at or below the paths, each once; a path without any is an error."""
    folders: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise LoadError(f"{path} is not a folder")
        found = list(_run_folders(path, DEPTH))
        if not found:
            raise LoadError(f"{path} holds no run: no config.toml in it, nor up to {DEPTH} folders below")
        for folder in found:
            folders.setdefault(folder.resolve(), folder)
    return _apart([load(folder) for folder in folders.values()])


def _apart(runs: list[Run]) -> list[Run]:
    """Runs of one label are seeds of one thing. Where they are not, their folder joins it: no mean mixes them."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    labels: dict[Path, str] = {}
    for label, group in groups.items():
        if not _are_seeds(group):
            labels |= {
                run.folder: f"{label} ({name})" for run, name in zip(group, _origins(group), strict=True)
            }
    return [replace(run, label=labels.get(run.folder, run.label)) for run in runs]


def _are_seeds(runs: Sequence[Run]) -> bool:
    """Whether these runs differ in their seeds, and in nothing else that matters."""
    settings = []
    for run in runs:
        kept = {key: value for key, value in run.config.items() if key not in _FREE}
        if isinstance(training := kept.get("training"), dict):
            kept["training"] = {key: training[key] for key in training if key not in _FREE_TRAINING}
        settings.append(kept)
    return len({run.seed for run in runs}) == len(runs) and all(one == settings[0] for one in settings)


def _origins(runs: Sequence[Run]) -> list[str]:
    """Where each run is from, as short as tells them apart: the experiment, or the run where that is not enough."""
    folders = [run.folder.resolve() for run in runs]
    origins = [folder if (folder / "experiment.toml").is_file() else folder.parent for folder in folders]
    parts: dict[Path, list[Run]] = {}
    for run, origin in zip(runs, origins, strict=True):
        parts.setdefault(origin, []).append(run)
    if not all(map(_are_seeds, parts.values())):
        origins = folders
    common = Path(os.path.commonpath(origins))
    common = common.parent if common in origins else common
    return [str(origin.relative_to(common)) for origin in origins]


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "config.toml").is_file():
        yield folder
    elif depth:
        listed = _listed(folder / "experiment.toml")
        children = sorted(filter(Path.is_dir, folder.iterdir()), key=_natural)
        for child in sorted(children, key=lambda path: listed.get(path.name, len(listed))):
            yield from _run_folders(child, depth - 1)


def _listed(file: Path) -> dict[str, int]:
    """The places of an experiment's folders in its list of runs: tables and colours keep to it."""
    try:
        runs = tomllib.loads(file.read_text(encoding="utf-8"))["runs"]
        return {Path(run["folder"]).parts[0]: place for place, run in reversed(list(enumerate(runs)))}
    except (OSError, ValueError, LookupError, TypeError):
        return {}  # no experiment, or not one that can be read: its runs are found all the same


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts seed-2 before seed-10."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", path.name)]


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{file} is missing: {file.parent} is no run folder") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LoadError(f"{file} cannot be read: {error}") from error
    for key, kind, what in (("label", str, "a string"), ("seed", int, "a whole number")):
        if not isinstance(config.get(key), kind):
            raise LoadError(f"{file} has no {key!r} that is {what}")
    return config


def _read_object(file: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is no such file."""
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise LoadError(f"{file} cannot be read: {error}") from error
    if not isinstance(summary, dict):
        raise LoadError(f"{file} is not a JSON object")
    return summary


def _read_rows(file: Path, finished: bool, numbers: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a file of JSON lines, each of which has these numbers."""
    try:
        with file.open(encoding="utf-8") as opened:
            lines = opened.readlines()
    except FileNotFoundError:
        if finished:
            raise LoadError(f"{file} is missing") from None
        return  # stopped before its first evaluation
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{file} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if not finished and number == len(lines) and not line.endswith("\n"):
                return  # the writer was stopped in the middle of this line
            raise LoadError(f"{file}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise LoadError(f"{file}, line {number} is not a JSON object")
        for key in numbers:
            if not isinstance(row.get(key), int | float):
                raise LoadError(f"{file}, line {number} has no number {key!r}")
        yield row


def _read_part(file: Path, names: Sequence[str]) -> pa.Table:
    try:
        with pq.ParquetFile(file) as part:
            missing = [name for name in names if name not in part.schema_arrow.names]
            if missing:
                raise LoadError(f"{file} has no column {missing[0]!r}")
            return part.read(columns=list(names)).select(list(names))
    except (OSError, pa.ArrowException) as error:
        raise LoadError(f"{file} cannot be read: {error}") from error
