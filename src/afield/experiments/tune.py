"""Grids of settings, such as the learning rates that papers try: every value runs, the best is named."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from afield.core.errors import InputError, closest, one_of
from afield.experiments.codec import assign, dumps
from afield.experiments.config import presets, read
from afield.experiments.paper import Entry, Paper, Preset, preset
from afield.experiments.reproduce import Say, carry_out, data_folder, going_on


@dataclass(frozen=True)
class Best:
    """What came out best in one setting; None where no run gave a number."""

    setting: str
    choice: str | None  # KEY=VALUE, several with a comma
    mean: float


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
    plan = _with_grid(chosen, values, scale, only, by)
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
            settings=[*settings, *([f"runtime.device={device}"] if device else [])],
            stand_in=stand_in or scale == "smoke",
            command=shlex.join(parts),
            again=going_on(parts, folder, seeds, only, device, data, stand_in),
            say=say,
        )
    return folder, _best(folder, by)


def _tunable(name: str) -> Preset:
    """A paper's preset, or any experiment: its variants are the rows then."""
    path = presets().get(name, Path(name))
    table = {"name": path.stem, **read(path)}
    if "paper" in table:
        return preset(table)
    rows = []
    for number, variant in enumerate(table.pop("variants", [])):
        rule = variant.get("strategy", {})
        usual = rule.get("name", str(number)) if isinstance(rule, Mapping) else rule
        rows.append({"label": usual, **variant})
    paper = {"citation": "none", "what": "grid", "about": f"{name}, every point of a grid"}
    for key in ("figure", "target", "label"):
        table.pop(key, None)
    return preset({**table, "rows": rows, "paper": paper})


def _grid(given: Sequence[str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for text in given:
        key, equals, written = text.partition("=")
        values = [part.strip() for part in written.split(",") if part.strip()]
        if not equals or not key.strip() or not values:
            raise InputError(
                f"--set-grid {text!r} is not KEY=V1,V2,...: write for example local.rate=0.01,0.1"
            )
        found[key.strip()] = [assign({}, f"value={value}")["value"] for value in values]
    return found


def _with_grid(
    chosen: Preset, values: Mapping[str, list[Any]], scale: str, only: Sequence[str], by: str
) -> Preset:
    """The same cells as rows, and the points of the grid as columns."""
    points = []
    for combination in itertools.product(*values.values()):
        changes: dict[str, Any] = {}
        texts = []
        for key, value in zip(values, combination, strict=True):
            texts.append(f"{key}={dumps({'v': value}).strip()[4:]}")
            changes = assign(changes, texts[-1])
        points.append(Entry(", ".join(texts), changes))
    cells = {cell.folder: cell for cell in chosen.cells(scale, only)}
    rows = tuple(Entry(cell.label, cell.table) for cell in cells.values())
    keys = {entry.label for entry in rows}
    if len(keys) < len(rows):
        raise InputError(f"{chosen.name} has two rows of one label{closest('', keys)}")
    paper: Paper = replace(
        chosen.paper,
        what="grid",
        about=f"{chosen.name}: {', '.join(values)}",
        kind="table",
        metric=by,
        open=(),
    )
    shared = {key: value for key, value in chosen.shared.items() if key in ("seeds", "sweep")}
    axes = {"rows": rows, "columns": tuple(points), "variants": (Entry(),)}
    return Preset(f"{chosen.name}-grid", paper, shared, axes, {}, {}, {})


def _best(folder: Path, by: str) -> list[Best]:
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
        found.append(Best(row, choice, mean))
    return found
