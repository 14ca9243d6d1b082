"""Grids of settings, such as the learning rates that papers try: every value runs, the best is named."""

from __future__ import annotations

import itertools
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from afield.core.errors import InputError, closest, one_of
from afield.experiments.codec import assign, dumps
from afield.experiments.config import OWN, presets, read, settled, variants_of
from afield.experiments.paper import Entry, Paper, Preset, preset
from afield.experiments.reproduce import Say, carry_out, check_settings, data_folder, going_on

FIXED = (*OWN, "seed", "label", "format")  # what a grid cannot try: tables and folders go by it


@dataclass(frozen=True)
class Best:
    """What came out best in one setting; None where no run gave a number."""

    setting: str
    choice: str | None  # KEY=VALUE, several with a comma
    mean: float
    settings: tuple[str, ...] = ()  # the same, one by one


def tune(
    name: str,
    grid: Sequence[str] = (),
    *,
    by: str = "final",
    scale: str = "paper",
    seeds: Sequence[int] | None = None,
    out: Path | None = None,
    device: str | None = None,
    data: Path | None = None,
    stand_in: bool = False,
    only: Sequence[str] = (),
    settings: Sequence[str] = (),
    say: Say = print,
) -> tuple[Path, list[Best]]:
    """Run every point of the grid for every cell of a preset (or variant of a config); gives folder and choices.

    `grid` holds KEY=v1,v2,...; a preset may have its own in [grid].
    """
    one_of("--by", by, ("final", "best"))
    chosen = _tunable(name)
    values = _grid(grid) if grid else dict(chosen.grid)
    if not values:
        raise InputError(f"{name} has no [grid]: give one by --set-grid local.rate=0.01,0.03,0.1")
    for key in values:
        if key in FIXED:
            raise InputError(
                f"the grid has {key!r}, which is no setting to try: leave it out; seeds are given by --seeds"
            )
    check_settings(settings)
    points = _points(values)
    plan = _with_grid(
        chosen, points, scale, only, by, [*settings, *([f"runtime.device={device}"] if device else [])]
    )
    folder = out if out is not None else Path("runs") / f"{plan.name}-{scale}"
    parts = ["afield", "tune", name, "--scale", scale, "--by", by]
    parts += [word for text in grid for word in ("--set-grid", text)]
    parts += [word for text in settings for word in ("--set", text)]
    with data_folder(data):
        carry_out(
            plan,
            folder,
            scale="paper",  # the cut was made above, before the grid was laid over it
            seeds=seeds or chosen.seeds(scale),
            stand_in=stand_in or scale == "smoke",
            command=shlex.join(parts),
            again=going_on(parts, folder, seeds, only, device, data, stand_in),
            say=say,
        )
    return folder, _best(folder, by, points)


def _tunable(name: str) -> Preset:
    """A paper's preset, or any experiment: its variants are the rows then."""
    path = presets().get(name, Path(name))
    table = {"name": path.stem, **read(path)}
    if "paper" in table:
        return preset(table)
    if "seed" in table:
        table.setdefault("seeds", [table["seed"]])
    rows = []
    for number, variant in enumerate(variants_of(table) if "variants" in table else []):
        rule = variant.get("strategy", {})
        usual = rule.get("name") if isinstance(rule, Mapping) else rule
        rows.append({"label": usual if isinstance(usual, str) else str(number), **variant})
    paper = {"citation": "none", "what": "grid", "about": f"{name}, every point of a grid"}
    for key in ("figure", "target", "label", "variants", "seed"):
        table.pop(key, None)
    return preset({**table, "rows": rows, "paper": paper})


def _grid(given: Sequence[str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for text in given:
        key, equals, written = text.partition("=")
        values = _listed(written)
        if not equals or not key.strip() or not values:
            raise InputError(
                f"--set-grid {text!r} is not KEY=V1,V2,...: write for example local.rate=0.01,0.1"
            )
        found[key.strip()] = values
    return found


def _listed(written: str) -> list[Any]:
    """Values with commas between them: as TOML has them where they are TOML (arrays have commas too), else plain."""
    try:
        found = tomllib.loads(f"values = [{written}]")["values"]
        if all(isinstance(value, bool | int | float | str | list) for value in found):
            return list(found)
    except tomllib.TOMLDecodeError:
        pass
    return [assign({}, f"value={part}")["value"] for part in written.split(",") if part.strip()]


def _points(values: Mapping[str, list[Any]]) -> dict[str, tuple[str, ...]]:
    """Every combination by its label: KEY=VALUE of each key."""
    found = {}
    for combination in itertools.product(*values.values()):
        pairs = zip(values, combination, strict=True)
        texts = tuple(f"{key}={dumps({'v': value}).strip()[4:]}" for key, value in pairs)
        found[", ".join(texts)] = texts
    return found


def _with_grid(
    chosen: Preset,
    points: Mapping[str, Sequence[str]],
    scale: str,
    only: Sequence[str],
    by: str,
    settings: Sequence[str],
) -> Preset:
    """The same cells as rows, with the settings, and the points of the grid as columns, which are laid over them."""
    columns = []
    for label, texts in points.items():
        changes: dict[str, Any] = {}
        for text in texts:
            changes = assign(changes, text)
        columns.append(Entry(label, changes))
    cells = {cell.folder: cell for cell in chosen.cells(scale, only)}
    rows = tuple(Entry(cell.label, settled(cell.table, settings)) for cell in cells.values())
    keys = {entry.label for entry in rows}
    if len(keys) < len(rows):
        raise InputError(f"{chosen.name} has two rows of one label{closest('', keys)}")
    paper: Paper = replace(
        chosen.paper,
        what="grid",
        about=f"{chosen.name}: {', '.join(text.partition('=')[0] for text in next(iter(points.values())))}",
        kind="table",
        metric=by,
        open=(),
    )
    shared = {key: value for key, value in chosen.shared.items() if key in ("seeds", "sweep")}
    axes = {"rows": rows, "columns": tuple(columns), "variants": (Entry(),)}
    return Preset(f"{chosen.name}-grid", paper, shared, axes, {}, {}, {})


def _best(folder: Path, by: str, points: Mapping[str, tuple[str, ...]]) -> list[Best]:
    """The best point of every row, from the runs."""
    from afield.reports import papers

    outcome = papers.gather(folder)
    found = []
    for row in outcome.rows:
        known = [
            (number.mean, place.column)
            for place in outcome.places
            if place.row == row and (number := place.number(by)) is not None and number.mean == number.mean
        ]
        mean, choice = max(known, default=(float("nan"), None), key=lambda pair: pair[0])
        found.append(Best(row, choice, mean, points.get(choice or "", ())))
    return found
