"""A paper's table or figure as data: an experiment with axes, the paper's numbers, and scales that cut it down."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from afield.core.errors import InputError, closest, one_of
from afield.experiments.codec import Table, decode, merge
from afield.experiments.config import Config, Sweep, experiment, presets, read
from afield.experiments.folder import slug

AXES = ("rows", "columns", "variants")
SCALES = ("smoke", "small", "paper")
KINDS = ("table", "curves", "lines", "bars", "heatmap", "heatmaps", "trajectories")
OWN = ("name", "paper", "theirs", "scales", "grid", "seeds", "sweep", *AXES)  # the rest is the experiment


@dataclass(frozen=True)
class Paper:
    """What is reproduced, how it is laid out, and what the paper leaves open."""

    citation: str
    what: str  # "Table 1"
    about: str  # one line
    cost: str = ""  # what the paper's scale takes
    kind: str = "table"
    metric: str = "final"  # the paper's number: a name of reports/quantities.py
    x: tuple[str, ...] = ("versions",)  # curves: one picture per axis; lines, heat map: what the columns are
    y: tuple[str, ...] = ("accuracy",)  # one row of panels each
    hidden: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # curves: rows left out, by axis
    panels: tuple[str, ...] = ()  # curves: the columns that are drawn (none: all)
    apart: bool = False  # lines and bars: a panel for each variant
    extras: tuple[str, ...] = ()  # more quantities for the table of all measurements
    open: tuple[str, ...] = ()  # what the paper leaves open, and what was chosen
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        one_of("kind", self.kind, KINDS)


@dataclass(frozen=True)
class Entry:
    """One row, column or variant: what it lays over the experiment.

    `at` lays more over where it meets a label of another axis; `only` names the labels that it is limited to.
    `alike`: what the columns differ in is nothing to this row, which is run once and shown in all of them.
    """

    label: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    at: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    alike: bool = False


@dataclass(frozen=True)
class Cell:
    """One place of the table: a run per seed."""

    row: str
    column: str
    variant: str
    table: Mapping[str, Any]
    alike: bool = False  # the run of another column is this one too

    @property
    def label(self) -> str:
        return ", ".join(self._parts)

    @property
    def folder(self) -> str:
        return "--".join(map(slug, self._parts)) or "run"

    @property
    def _parts(self) -> list[str]:
        column = "" if self.alike else self.column
        return [part for part in (self.row, column, self.variant) if part]

    def configs(self, seeds: Sequence[int], settings: Sequence[str] = ()) -> list[Config]:
        table = {**self.table, "label": self.label or "run", "seeds": list(seeds)}
        return list(experiment(table, settings=settings).runs)


@dataclass(frozen=True)
class Preset:
    """A whole preset, as its file has it."""

    name: str
    paper: Paper
    shared: Mapping[str, Any]
    axes: Mapping[str, tuple[Entry, ...]]
    theirs: Mapping[str, Any]
    scales: Mapping[str, Table]
    grid: Mapping[str, list[Any]]

    def seeds(self, scale: str) -> tuple[int, ...]:
        found = self.scales.get(scale, {}).get("seeds", self.shared.get("seeds", [0]))
        if not isinstance(found, list) or not found or not all(isinstance(seed, int) for seed in found):
            raise InputError(
                f"{self.name}: seeds = {found} at scale {scale!r}: write for example seeds = [0]"
            )
        return tuple(found)

    def sweep(self, scale: str) -> Sweep:
        table = merge(self.shared.get("sweep", {}), self.scales.get(scale, {}).get("sweep", {}))
        return decode(Sweep, table, {}, "sweep")

    def cells(self, scale: str = "paper", only: Sequence[str] = ()) -> list[Cell]:
        """Every row x column x variant at a scale, but those that `only` (labels of any axis) leaves out."""
        one_of("--scale", scale, SCALES)
        cut = self.scales.get(scale, {})
        kept = self._kept(
            self._kept({axis: list(self.axes[axis]) for axis in AXES}, cut.get("only", ())), only
        )
        over = {key: value for key, value in cut.items() if key not in (*AXES, "only", "seeds", "sweep")}
        plain = {key: value for key, value in self.shared.items() if key not in ("seeds", "sweep")}
        found = []
        for entries in itertools.product(*(kept[axis] for axis in AXES)):
            labels = [entry.label for entry in entries]
            if any(entry.only and not set(entry.only) & set(labels) for entry in entries):
                continue
            laid = dict(zip(AXES, entries, strict=True))
            if alike := laid["rows"].alike:
                del laid["columns"]
            table = plain
            for entry in laid.values():
                table = merge(table, entry.changes)
            for entry, other in itertools.product(laid.values(), laid.values()):
                table = merge(table, entry.at.get(other.label, {}))
            table = merge(table, over)
            for axis, entry in laid.items():
                table = merge(table, cut.get(axis, {}).get(entry.label, {}))
            row, column, variant = labels
            found.append(Cell(row, column, variant, table, alike))
        once = {(cell.row, cell.alike or cell.column, cell.variant): cell.folder for cell in found}
        for place, count in Counter(once.values()).items():
            if count > 1:
                raise InputError(f"{self.name}: {count} cells make the folder {place!r}: choose other labels")
        return found

    def _kept(self, entries: dict[str, list[Entry]], only: Sequence[str]) -> dict[str, list[Entry]]:
        """An axis keeps the labels that are named, and all of them where none of its is."""
        known = [entry.label for axis in AXES for entry in entries[axis] if entry.label]
        for label in only:
            if label not in known:
                raise InputError(
                    f"{label!r} is no row, column or variant of {self.name}{closest(label, known)}"
                )
        return {
            axis: [entry for entry in listed if entry.label in only] or listed
            for axis, listed in entries.items()
        }


def papers() -> dict[str, Path]:
    """The presets that make a table or figure of a paper, by name."""
    return {name: path for name, path in presets().items() if "paper" in read(path)}


def load_preset(name: str) -> Preset:
    """A preset by its name, or from a TOML file of the user's."""
    path = presets().get(name, Path(name))
    if not path.is_file():
        raise InputError(f"{name} is neither a paper's preset nor a file{closest(name, papers())}")
    table = read(path)
    if "paper" not in table:
        raise InputError(f"{name} has no [paper] table: afield run takes it, afield reproduce does not")
    return preset({"name": path.stem, **table})


def preset(table: Mapping[str, Any]) -> Preset:
    """The preset that a table describes."""
    name = str(table["name"])
    try:
        return _preset(name, table)
    except InputError as error:
        raise InputError(f"preset {name}: {error}") from error


def _preset(name: str, table: Mapping[str, Any]) -> Preset:
    for key in ("theirs", "scales", "grid", "sweep"):
        _check_table(key, table.get(key, {}))
    theirs = dict(table.get("theirs", {}))
    axes = {axis: _axis(axis, table.get(axis, [])) for axis in AXES}
    labels = [entry.label for axis in AXES for entry in axes[axis]]
    for entry in (entry for axis in AXES for entry in axes[axis]):
        for label in (*entry.at, *entry.only):
            if label not in labels:
                raise InputError(f"{entry.label!r} names {label!r}{closest(label, labels)}")
    scales = _scales(table.get("scales", {}), axes)
    _check_theirs(theirs, axes)
    grid = table.get("grid", {})
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"grid.{key} = {values!r} is not an array of values")
    shared = {key: value for key, value in table.items() if key not in OWN or key in ("seeds", "sweep")}
    paper = decode(Paper, table["paper"], {}, "paper")
    return Preset(name, paper, shared, axes, theirs, scales, grid)


def _check_table(key: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise InputError(f"{key} = {value!r} is not a table")


def _check_labels(key: str, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(label, str) for label in value):
        raise InputError(f"{key} = {value!r} is not an array of labels: write for example ['a', 'b']")


def _axis(axis: str, given: Any) -> tuple[Entry, ...]:
    if not isinstance(given, list) or not all(isinstance(entry, Mapping) for entry in given):
        raise InputError(f"{axis} is not an array of tables: write [[{axis}]] before each")
    found: list[Entry] = []
    for number, entry in enumerate(given):
        label = entry.get("label")
        if not isinstance(label, str) or not label:
            raise InputError(f"{axis}[{number}] has no label: write label = '...'")
        if label in [other.label for other in found]:
            raise InputError(f"two of {axis} are labelled {label!r}: give each its own label")
        changes = {key: value for key, value in entry.items() if key not in ("label", "at", "only", "alike")}
        _check_table(f"{axis}[{number}].at", entry.get("at", {}))
        for other, more in entry.get("at", {}).items():
            _check_table(f"{axis}[{number}].at.{other}", more)
        _check_labels(f"{axis}[{number}].only", entry.get("only", []))
        alike = entry.get("alike", False)
        if alike and axis != "rows":
            raise InputError(f"{axis}: {label!r} is alike = true: only rows can be")
        found.append(Entry(label, changes, entry.get("at", {}), tuple(entry.get("only", ())), alike))
    return tuple(found) or (Entry(),)


def _scales(given: Mapping[str, Any], axes: Mapping[str, tuple[Entry, ...]]) -> dict[str, Table]:
    known = (*(column.name for column in fields(Config)), *AXES, "only", "seeds", "sweep")
    for scale, cut in given.items():
        one_of("scales", scale, SCALES[:-1])
        _check_table(f"scales.{scale}", cut)
        _check_labels(f"scales.{scale}.only", cut.get("only", []))
        for key in cut:
            if key not in known:
                raise InputError(f"scales.{scale}.{key} is not a key{closest(key, known)}")
        _check_table(f"scales.{scale}.sweep", cut.get("sweep", {}))
        for axis in AXES:
            labels = [entry.label for entry in axes[axis]]
            _check_table(f"scales.{scale}.{axis}", cut.get(axis, {}))
            for label, more in cut.get(axis, {}).items():
                _check_table(f"scales.{scale}.{axis}.{label}", more)
                if label not in labels:
                    raise InputError(f"scales.{scale}.{axis} names {label!r}{closest(label, labels)}")
    return {scale: dict(cut) for scale, cut in given.items()}


def _check_theirs(theirs: Mapping[str, Any], axes: Mapping[str, tuple[Entry, ...]]) -> None:
    """Their numbers: by row one entry per column; where there are variants, by row and variant if those have any."""
    rows, columns, variants = ([entry.label for entry in axes[axis]] for axis in AXES)
    for row, given in theirs.items():
        if row not in (rows if rows != [""] else ["all"]):
            raise InputError(f"theirs names the row {row!r}{closest(row, rows)}")
        for variant, values in given.items() if isinstance(given, Mapping) else [("", given)]:
            if variant and variant not in variants:
                raise InputError(f"theirs.{row} names the variant {variant!r}{closest(variant, variants)}")
            if not isinstance(values, list) or len(values) != len(columns):
                raise InputError(f"theirs.{row} = {values} is not an array of {len(columns)}, one per column")
            for value in values:
                _check_number(row, value)


def _check_number(row: str, value: Any) -> None:
    """A number, [mean, std], [] where the paper has none, or a label."""
    if isinstance(value, list):
        good = len(value) in (0, 2) and all(isinstance(part, int | float) for part in value)
    else:
        good = isinstance(value, int | float | str)
    if not good:
        raise InputError(
            f"theirs.{row} has {value!r}: write a number, [mean, std], or [] where there is none"
        )
