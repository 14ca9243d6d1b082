"""Figures of papers in their own layout: curves, a quantity over a parameter, bars, heat maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from afield.reports.curves import Floats, on_grid
from afield.reports.load import LoadError, Run
from afield.reports.papers import Outcome, Place
from afield.reports.plots import INK, _colour, _dash, _dress, _save, trajectories
from afield.reports.quantities import quantity

# name -> (key of a metrics row, factor, title); a communication is a model sent or received by the server
X = {
    "versions": ("version", 1, "global epochs (versions)"),
    "updates": ("updates", 1, "accepted updates"),
    "gradients": ("steps", 1, "gradients"),
    "communications": ("updates", 2, "communications"),
    "time": ("time", 1, "virtual time"),
    "wall": ("wall", 1, "wall time (s)"),
}
Y = {"accuracy": "test accuracy", "loss": "test loss", "train_loss": "training loss"}
SHARED = ("gradients", "communications")
WIDE, HIGH = 3.4, 2.8  # inches of a panel
WIDE_RANGE = 30  # columns that span more than this lie on a logarithmic axis


def draw(outcome: Outcome, folder: Path) -> None:
    """Every picture of the outcome."""
    kind, paper = outcome.paper["kind"], outcome.paper
    if kind == "curves":
        split = _split(outcome)  # one picture per row, one line per variant
        for x in paper["x"]:
            name = "figure" if len(paper["x"]) == 1 else f"figure-{x}"
            for row in outcome.rows if split else [None]:
                own = name if row is None else f"{name}-{_file(row)}"
                _curves(outcome, x, folder / f"{own}.png", row)
    elif kind == "heatmap":
        _heatmap(outcome, folder / "figure.png")
    elif kind == "heatmaps":
        _heatmaps(outcome, folder / "figure.png")
    elif kind == "trajectories":
        _trajectories(outcome, folder / "figure.png")
    else:
        _over_columns(outcome, folder / "figure.png", bars=kind == "bars")


def _split(outcome: Outcome) -> bool:
    """Whether rows are settings of their own, in each of which variants are compared."""
    return len(outcome.rows) > 1 and any(variant for _, variant in outcome.lines)


def _file(label: str) -> str:
    """A label as part of a file's name."""
    return "-".join("".join(letter if letter.isalnum() else " " for letter in label).split())


def _panels(rows: int, columns: int) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(WIDE * columns + 0.4, HIGH * rows + 0.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    found = [
        [figure.add_subplot(rows, columns, row * columns + column + 1) for column in range(columns)]
        for row in range(rows)
    ]
    for panel in (panel for row in found for panel in row):
        _dress(panel)
    return figure, found


def _legend(figure: Figure, lines: Sequence[tuple[int, tuple[str, str]]]) -> None:
    """The names of numbered lines."""
    keys = [Line2D([], [], color=_colour(i), linestyle=_dash(i), linewidth=1.6) for i, _ in lines]
    names = [", ".join(part for part in line if part) or "ours" for _, line in lines]
    columns = max(1, min(len(names), 4, int(figure.get_figwidth() / (0.5 + 0.07 * max(map(len, names))))))
    figure.legend(keys, names, loc="outside upper center", ncols=columns, frameon=False, fontsize=8)


# -- curves -------------------------------------------------------------------------------------------


def _curves(outcome: Outcome, x: str, path: Path, only: str | None = None) -> None:
    """One panel per column (and per y), one line per row: mean and standard deviation over seeds."""
    if x not in X:
        raise LoadError(f"x = {x!r} is no axis: choose from {', '.join(X)}")
    measures, drawn = outcome.paper["y"], outcome.paper.get("panels") or outcome.columns
    hidden = outcome.paper["hidden"].get(x, ())
    own = [line for line in outcome.lines if only in (None, line[0])]
    lines = [(number, line) for number, line in enumerate(own) if line[0] not in hidden]
    columns = [c for c in outcome.columns if c in drawn and any(outcome.at(line, c) for _, line in lines)]
    if not columns:
        return
    figure, panels = _panels(len(measures), len(columns))
    for y, row in zip(measures, panels, strict=True):
        for column, panel in zip(columns, row, strict=True):
            panel.set_xmargin(0)
            found = [(number, place) for number, line in lines if (place := outcome.at(line, column))]
            ends = [_curve(panel, place.runs, x, y, number) for number, place in found]
            if x in SHARED:  # rounds give ten times as much of it: shown as far as all go
                panel.set_xlim(0, min((end for end in ends if end), default=1.0))
            panel.set_xlabel(X[x][2])
            panel.set_ylabel(Y.get(y, y))
            panel.set_title(column, fontsize=9, color=INK)
    _legend(figure, lines if only is None else [(number, ("", line[1])) for number, line in lines])
    _save(figure, path)


def _curve(panel: Axes, runs: Sequence[Run], x: str, y: str, number: int) -> float:
    """Draws a line; gives where it ends (0: there was nothing to draw)."""
    key, factor, _ = X[x]
    curves: list[tuple[Floats, Floats]] = []
    for run in runs:
        rows = [row for row in run.series(y) if key in row and math.isfinite(row[y])]
        if rows:
            points = np.array([factor * row[key] for row in rows], float)
            curves.append((points, np.array([row[y] for row in rows], float)))
    if not curves:
        return 0.0
    grid, held = on_grid(curves)
    mean, std = held.mean(axis=0), held.std(axis=0, ddof=1) if len(curves) > 1 else 0.0
    panel.plot(grid, mean, color=_colour(number), linestyle=_dash(number), linewidth=1.4, zorder=3)
    if len(curves) > 1:
        panel.fill_between(grid, mean - std, mean + std, color=_colour(number), alpha=0.18, linewidth=0)
    return float(grid[-1])


# -- one number per run ---------------------------------------------------------------------------------


def _over_columns(outcome: Outcome, path: Path, bars: bool) -> None:
    """The columns along the x axis, one line (or bar of a group) per row; the paper's numbers as hollow points.

    Panels: one per variant with a line per row where the preset says `apart`; else, of lines with variants, one per
    row with a line per variant.
    """
    names = [outcome.metric if y == "accuracy" else y for y in outcome.paper["y"]]
    keys = list(outcome.lines)
    parts: list[tuple[str, list[tuple[str, str]]]] = [("", keys)]
    variants = list(dict.fromkeys(variant for _, variant in keys))
    if outcome.paper.get("apart"):
        parts = [(variant, [(row, variant) for row in outcome.rows]) for variant in variants]
        keys = [(row, "") for row in outcome.rows]
    elif not bars and _split(outcome):
        parts = [(row, [(row, variant) for variant in variants]) for row in outcome.rows]
        keys = [("", variant) for variant in variants]
    across = len(parts) == 1  # then the quantities lie side by side
    figure, panels = _panels(1, len(names)) if across else _panels(len(names), len(parts))
    wanted = (
        [[(name, *parts[0]) for name in names]] if across else [[(n, *part) for part in parts] for n in names]
    )
    for told, row_of_panels in zip(wanted, panels, strict=True):
        for (name, title, lines), panel in zip(told, row_of_panels, strict=True):
            _lines(outcome, panel, name, lines, bars)
            panel.set_title(title, fontsize=9, color=INK)
    _legend(figure, list(enumerate(keys)))
    _save(figure, path)


def _lines(outcome: Outcome, panel: Axes, name: str, lines: Sequence[tuple[str, str]], bars: bool) -> None:
    """One panel: a quantity over the columns."""
    columns = outcome.columns
    at = _positions(columns) if not bars else [float(i) for i in range(len(columns))]
    width = 0.8 / len(lines)
    for number, line in enumerate(lines):
        shift = (number - (len(lines) - 1) / 2) * width if bars else 0.0
        found = [
            (x + shift, place) for x, c in zip(at, columns, strict=True) if (place := outcome.at(line, c))
        ]
        _points(panel, name, found, number, width if bars else 0.0)
        if name == outcome.metric:
            told = [(x, place.theirs.mean) for x, place in found if place.theirs is not None]
            if told:
                panel.plot(
                    *zip(*told, strict=True), "D", markerfacecolor="none", color=_colour(number), zorder=4
                )
    panel.set_ylabel(quantity(name).title)
    panel.set_xlabel(outcome.paper["x"][0] if outcome.paper["kind"] == "lines" else "")
    if not bars and min(at) > 0 and max(at) > WIDE_RANGE * min(at):
        panel.set_xscale("log")
        panel.minorticks_off()
    panel.set_xticks(at, columns, rotation=0 if max(map(len, columns)) < 9 else 20)


def _positions(columns: Sequence[str]) -> list[float]:
    """Labels that are numbers lie where they are; others one after the other."""
    try:
        return [float(column) for column in columns]
    except ValueError:
        return [float(place) for place in range(len(columns))]


def _points(panel: Axes, name: str, found: Sequence[tuple[float, Place]], number: int, width: float) -> None:
    known = [(x, spread) for x, place in found if (spread := place.ours(name)) is not None]
    known = [(x, spread) for x, spread in known if math.isfinite(spread.mean)]
    if not known:
        return
    xs = [x for x, _ in known]
    means, stds = [spread.mean for _, spread in known], [spread.std for _, spread in known]
    if width:
        panel.bar(xs, means, width, yerr=stds, color=_colour(number), alpha=0.85, ecolor=INK)
    else:
        panel.errorbar(
            xs, means, yerr=stds, color=_colour(number), linestyle=_dash(number), marker="o", markersize=3
        )


# -- heat maps ------------------------------------------------------------------------------------------


def _heatmap(outcome: Outcome, path: Path) -> None:
    """Rows and columns as in the paper: the best variant of each cell, or the quantity itself; ours, then theirs."""
    ours, theirs = _field(outcome, ours=True), _field(outcome, ours=False)
    fields = [("ours", ours)] + ([("paper", theirs)] if np.isfinite(theirs).any() else [])
    known = np.concatenate([values[np.isfinite(values)] for _, values in fields])
    if outcome.chooses:  # one colour for a variant in every result, whichever were chosen
        variants = outcome.plan["axes"]["variants"]
        known = np.array([_value(variant, variants) for variant in variants])
    figure, (row,) = _panels(1, len(fields))
    if outcome.chooses:  # three lines of text in a cell
        figure.set_size_inches(
            max(WIDE, 0.62 * len(outcome.columns)) * len(fields) + 0.6,
            max(HIGH, 0.48 * len(outcome.rows)) + 0.5,
        )
    for (title, values), panel in zip(fields, row, strict=True):
        _map(outcome, panel, title, values, known)
    _save(figure, path)


def _map(outcome: Outcome, panel: Axes, title: str, values: Floats, known: Floats) -> None:
    """One map; `known`: all values that share its colours."""
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    panel.imshow(values, cmap="viridis", vmin=low, vmax=high, aspect="auto")
    panel.grid(False)
    panel.set_title(title, fontsize=9, color=INK)
    panel.set_xticks(range(len(outcome.columns)), outcome.columns)
    panel.set_yticks(range(len(outcome.rows)), outcome.rows)
    if outcome.paper["x"][0] not in X:
        panel.set_xlabel(outcome.paper["x"][0])
    for (i, j), value in np.ndenumerate(values):
        if math.isfinite(value):
            colour = "w" if value < (low + high) / 2 else "k"
            text = _written(outcome, i, j, title == "ours") if outcome.chooses else f"{value:.3g}"
            panel.text(j, i, text, ha="center", va="center", fontsize=6.5, color=colour)


def _heatmaps(outcome: Outcome, path: Path) -> None:
    """One map of the quantity per variant, rows and columns as in the paper, one scale of colours for all."""
    variants = list(dict.fromkeys(place.variant for place in outcome.places))
    maps = [_field(outcome, ours=True, variant=variant) for variant in variants]
    known = np.concatenate([values[np.isfinite(values)] for values in maps])
    wide = min(3, len(maps))
    figure, panels = _panels(-(-len(maps) // wide), wide)
    flat = [panel for row in panels for panel in row]
    for panel, variant, values in zip(flat, variants, maps, strict=False):
        _map(outcome, panel, variant, values, known)
    for panel in flat[len(maps) :]:
        panel.set_visible(False)
    _save(figure, path)


def _written(outcome: Outcome, i: int, j: int, ours: bool) -> str:
    """What a cell says of its best variant, one thing a line."""
    tell = outcome.our_cell if ours else outcome.their_cell
    return tell(outcome.rows[i], outcome.columns[j]).replace(" (", "\n").replace(", ", "\n").rstrip(")")


def _field(outcome: Outcome, ours: bool, variant: str = "") -> Floats:
    values = np.full((len(outcome.rows), len(outcome.columns)), math.nan)
    for i, row in enumerate(outcome.rows):
        for j, column in enumerate(outcome.columns):
            if outcome.chooses:
                label = outcome.chosen(row, column) if ours else outcome.their_choice(row, column)
                values[i, j] = _value(label, outcome.plan["axes"]["variants"])
            elif (place := outcome.at((row, variant), column)) is not None:
                number = place.number(outcome.metric) if ours else place.theirs
                values[i, j] = math.nan if number is None else number.mean
    return values


def _value(label: str | None, labels: Sequence[str]) -> float:
    """A label as a number, or its place among the labels."""
    if label is None:
        return math.nan
    try:
        return float(label)
    except ValueError:
        return float(labels.index(label)) if label in labels else math.nan


# -- quadratics -----------------------------------------------------------------------------------------


def _trajectories(outcome: Outcome, path: Path) -> None:
    """The ways of the first seed through the clients' quadratics, and the gap to the optimum of all seeds."""
    problem = outcome.runs[0].config["scenario"]["data"]
    if problem["name"] != "quadratic":
        raise LoadError(f"kind = 'trajectories' draws the data 'quadratic' only, not {problem['name']!r}")
    matrices = [((a, b), (b, d)) for a, b, d in problem["curvatures"]]
    pulls = [np.array(a) @ np.array(c) for a, c in zip(matrices, problem["optima"], strict=True)]
    optimum = np.linalg.solve(np.sum(matrices, axis=0), np.sum(pulls, axis=0))
    trajectories(outcome.runs, path, matrices, problem["optima"], [float(value) for value in optimum])
