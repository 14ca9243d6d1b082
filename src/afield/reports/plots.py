"""Pictures of runs. Figure objects only, no pyplot: nothing global, nothing to close, no display."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, PercentFormatter

from afield.reports.curves import COLOURS, Axis, Curve, Floats, axis, curve, on_grid
from afield.reports.load import LoadError, Run

DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
INK, FAINT = "#333333", "#DDDDDD"


def accuracy(runs: Sequence[Run], path: str | Path, x: Axis = "time", target: float | None = None) -> None:
    """Test accuracy (loss, where no run has an accuracy): one line per label, mean and range over its seeds."""
    key, title = axis(x)
    y = "accuracy" if any(run.series("accuracy") for run in runs) else "loss"
    groups = _groups(runs, y)
    figure, (axes,) = _canvas(1, (7.0, 4.2))
    ends: dict[str, tuple[float, float]] = {}
    for i, (label, group) in enumerate(groups.items()):
        grid, held = on_grid([curve(run, key, y) for run in group])
        mean = held.mean(axis=0)
        axes.plot(grid, mean, color=_colour(i), linestyle=_dash(i), linewidth=1.6, zorder=3)
        if len(group) > 1:
            low, high = held.min(axis=0), held.max(axis=0)
            axes.fill_between(grid, low, high, color=_colour(i), alpha=0.18, linewidth=0, zorder=2)
        ends[label] = (float(grid[-1]), float(mean[-1]))

    axes.set_xlabel(title)
    axes.set_xmargin(0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    _scale(axes, y, target)
    _name_lines(axes, ends)
    _note_seeds(axes, "mean and range", groups)
    _save(figure, path)


def trajectories(
    runs: Sequence[Run],
    path: str | Path,
    curvatures: Sequence[Any],
    optima: Sequence[Sequence[float]],
    optimum: Sequence[float],
) -> None:
    """Two clients' quadratics in the plane, each algorithm's way through them, and what is left to gain.

    Client i has F_i(w) = 1/2 (w - optima[i])' A_i (w - optima[i]); `curvatures[i]` is A_i: a number, its
    diagonal or the whole matrix. The objective is their mean. Ways are drawn for the first seed of a
    label; the gap to the optimum is computed from the rows' "params", so it needs no convention
    for the recorded loss.
    """
    matrices, centres = [_matrix(entry) for entry in curvatures], [np.asarray(o, float) for o in optima]
    best = np.asarray(optimum, float)
    groups = _groups(runs, "params")
    ways = {label: [_way(run) for run in group] for label, group in groups.items()}

    figure, (left, right) = _canvas(2, (10.0, 4.6))
    starts = [way[0][1][0] for way in ways.values()]
    view = _view([way[0][1] for way in ways.values()], np.stack([*centres, best, *starts]))
    _contours(left, matrices, centres, view)
    for i, group_ways in enumerate(ways.values()):
        _, points = group_ways[0]
        left.plot(*points.T, color=_colour(i), linestyle=_dash(i), linewidth=1.1, alpha=0.9, zorder=3)
    _landmarks(left, centres, best, starts[0])

    for i, group_ways in enumerate(ways.values()):
        grid, held = on_grid(
            [(rounds, _gap(points, matrices, centres, best)) for rounds, points in group_ways]
        )
        low, middle, high = np.quantile(held, [0.25, 0.5, 0.75], axis=0)
        right.plot(grid, middle, color=_colour(i), linestyle=_dash(i), linewidth=1.4, zorder=3)
        if len(group_ways) > 1:
            right.fill_between(grid, low, high, color=_colour(i), alpha=0.18, linewidth=0, zorder=2)
    # Quartiles, because the smallest of some gaps near zero spans decades on this scale.
    _note_seeds(right, "median and quartiles", groups)
    right.set_yscale("log")
    right.set_xmargin(0)
    right.set_xlabel("round")
    right.set_ylabel("loss above the optimum")
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    keys = [Line2D([], [], color=_colour(i), linestyle=_dash(i), linewidth=1.6) for i in range(len(ways))]
    figure.legend(keys, list(ways), loc="outside upper center", ncols=min(len(ways), 5), frameon=False)
    _save(figure, path)


@dataclass(frozen=True)
class Panel:
    """A quantity: one list per line style, in it one list per label, in it one curve per seed."""

    title: str
    styles: list[list[list[Curve]]]
    log: bool = False
    percent: bool = False


def panels(labels: Sequence[str], wanted: Sequence[Panel], path: str | Path, x: Axis = "time") -> None:
    """Several quantities over one axis, two rows of panels: the mean over seeds, one colour per label."""
    figure, places = _canvas(len(wanted), (11.0, 6.4), rows=2)
    for axes, panel in zip(places, wanted, strict=True):
        for style, curves in enumerate(panel.styles):
            for i, seeds in enumerate(curves):
                if seeds:
                    grid, held = on_grid(seeds)
                    dash = DASHES[2] if style else _dash(i)
                    axes.plot(grid, held.mean(axis=0), color=_colour(i), linestyle=dash, linewidth=1.3)
        if not axes.lines:
            axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=INK)
        elif panel.log:
            axes.set_yscale("log")
        axes.set_title(panel.title, fontsize=9, color=INK, loc="left")
        axes.set_xmargin(0)
        axes.set_xlabel(axis(x)[1])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        if panel.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    keys = [Line2D([], [], color=_colour(i), linestyle=_dash(i)) for i in range(len(labels))]
    figure.legend(keys, list(labels), loc="outside upper center", ncols=min(len(labels), 6), frameon=False)
    _save(figure, path)


# -- the parts that all share ------------------------------------------------------------------------


def _canvas(panels: int, size: tuple[float, float], rows: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(rows, panels // rows, i + 1) for i in range(panels)]
    for panel in axes:
        _dress(panel)
    return figure, axes


def _dress(panel: Axes) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8, color=INK, labelcolor=INK)
    panel.grid(axis="y", color=FAINT, linewidth=0.6)
    panel.set_axisbelow(True)
    for side in (panel.xaxis, panel.yaxis):
        side.label.set_fontsize(9)
        side.label.set_color(INK)


def _save(figure: Figure, path: str | Path) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _groups(runs: Sequence[Run], key: str) -> dict[str, list[Run]]:
    """Runs by label, in the order of their first appearance; each must have `key` in some evaluation."""
    if not runs:
        raise LoadError("there is no run to draw")
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if not any(row.get(key) is not None for row in run.metrics):
            raise LoadError(f"{run.folder / 'metrics.jsonl'} has no {key!r} to draw")
        groups.setdefault(run.label, []).append(run)
    return groups


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _dash(i: int) -> Any:
    return DASHES[i // len(COLOURS) % len(DASHES)]


def _note_seeds(axes: Axes, what: str, groups: dict[str, list[Run]]) -> None:
    counts = {len(group) for group in groups.values()}
    if max(counts) > 1:
        many = f"{max(counts)}" if len(counts) == 1 else f"up to {max(counts)}"
        axes.set_title(f"{what} over {many} seeds", fontsize=8, color=INK, loc="left")


# -- accuracy over time -------------------------------------------------------------------------------


def _scale(axes: Axes, y: str, target: float | None) -> None:
    if y == "loss":
        low, high = axes.dataLim.intervaly
        if low > 0 and high / low > 30:
            axes.set_yscale("log")
        axes.set_ylabel("test loss")
        return
    axes.set_ylabel("test accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    low, high = axes.dataLim.intervaly
    if target is not None:
        low, high = min(low, target), max(high, target)
    room = 0.05 * max(high - low, 0.02)
    axes.set_ylim(max(low - room, -0.005), min(high + room, 1.005))
    if target is not None:
        axes.axhline(target, color="#777777", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        # At the left, where accuracies are low, and so usually out of the way of every line.
        axes.annotate(
            f"target {100 * target:.4g}%",
            (0, target),
            (4, 2),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            fontsize=7.5,
            color="#777777",
        )


def _name_lines(axes: Axes, ends: dict[str, tuple[float, float]]) -> None:
    """Names beside the ends of the lines, moved apart as far as they would overlap."""
    to_axes = axes.transData + axes.transAxes.inverted()
    right = axes.get_xlim()[1]
    tops = [float(to_axes.transform((right, y))[1]) for _, y in ends.values()]
    tops = [min(max(top, 0.0), 1.0) if math.isfinite(top) else 0.0 for top in tops]
    size = 8.5 if len(ends) <= 18 else 6.5
    # A line of text in axes of 3.4 inches; beyond 18 names they share what height there is.
    places = _moved_apart(tops, min(0.055, 1 / max(len(ends) - 1, 1)))
    for i, (label, (x, y)) in enumerate(ends.items()):
        colour, dash = _colour(i), _dash(i)
        if x < right:  # its runs ended earlier: lead the eye to its name
            axes.plot([x, right], [y, y], color=colour, linestyle=":", linewidth=0.6, alpha=0.7, zorder=1)
            axes.plot(x, y, "o", color=colour, markersize=3, zorder=3)
        leader = Line2D([1.006, 1.022, 1.055], [tops[i], places[i], places[i]], color=colour, linestyle=dash)
        leader.set(transform=axes.transAxes, linewidth=1.1, clip_on=False)
        axes.add_artist(leader)
        axes.text(1.063, places[i], label, transform=axes.transAxes, fontsize=size, color=INK, va="center")


def _moved_apart(heights: Sequence[float], gap: float) -> list[float]:
    """The heights at least `gap` apart, within [0, 1], in the same order, each moved as little as may be.

    Less i * gap, the i-th lowest must not lie below the one before: that is isotonic regression, solved by
    pooling neighbours in the wrong order at their mean.
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    pools: list[list[float]] = []
    for rank, i in enumerate(order):
        pools.append([heights[i] - rank * gap])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    flat = [float(np.mean(pool)) for pool in pools for _ in pool]
    highest = 1 - gap * (len(heights) - 1)
    places = [0.0] * len(heights)
    for rank, i in enumerate(order):
        places[i] = min(max(flat[rank], 0.0), highest) + rank * gap
    return places


# -- quadratics -----------------------------------------------------------------------------------------


def _matrix(entry: Any) -> Floats:
    values = np.asarray(entry, float)
    return values if values.ndim == 2 else np.diag(np.broadcast_to(values, 2))


def _way(run: Run) -> tuple[Floats, Floats]:
    rows = [row for row in run.metrics if row.get("params") is not None]
    points = np.array([row["params"] for row in rows], float)
    if points.ndim != 2 or points.shape[1] != 2:
        raise LoadError(f"{run.folder / 'metrics.jsonl'}: 'params' are not two numbers a row")
    return np.array([row["version"] for row in rows], float), points


def _values(points: Floats, matrix: Floats, centre: Floats) -> Floats:
    away = points - centre
    values: Floats = 0.5 * np.einsum("...i,ij,...j->...", away, matrix, away)
    return values


def _gap(points: Floats, matrices: list[Floats], centres: list[Floats], best: Floats) -> Floats:
    pairs = list(zip(matrices, centres, strict=True))
    loss = np.mean([_values(points, *pair) for pair in pairs], axis=0)
    lowest = float(np.mean([_values(best, *pair) for pair in pairs]))
    gap: Floats = loss - lowest
    if gap.min() < -1e-6 * max(1.0, abs(lowest)):
        raise ValueError(
            f"optimum = {best.tolist()} is not the minimum of the mean of the clients' quadratics"
        )
    return np.maximum(gap, 1e-16)  # at the optimum to the last bit there is no logarithm


def _view(ways: list[Floats], marks: Floats) -> tuple[Floats, Floats]:
    """The corners of what is shown: every landmark, and the ways as far as they do not dwarf the landmarks."""
    low, high = marks.min(axis=0), marks.max(axis=0)
    room = float(np.max(high - low))
    points = np.concatenate(ways)
    finite = points[np.isfinite(points).all(axis=1)]
    low = np.maximum(np.minimum(low, finite.min(axis=0)), low - 0.5 * room)
    high = np.minimum(np.maximum(high, finite.max(axis=0)), high + 0.5 * room)
    return low - 0.12 * room, high + 0.12 * room


def _contours(axes: Axes, matrices: list[Floats], centres: list[Floats], view: tuple[Floats, Floats]) -> None:
    (left, bottom), (right, top) = view
    mesh = np.stack(np.meshgrid(np.linspace(left, right, 200), np.linspace(bottom, top, 200)), axis=-1)
    for matrix, centre, dash in zip(matrices, centres, ("solid", "dashed"), strict=False):
        values = _values(mesh, matrix, centre)
        # Squares: a quadratic's contours at equal distances.
        levels = values.max() * (np.arange(1, 8) / 8) ** 2
        axes.contour(
            mesh[..., 0], mesh[..., 1], values, levels, colors="#BBBBBB", linewidths=0.6, linestyles=dash
        )
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    axes.set_aspect("equal")
    axes.grid(False)
    axes.set_xlabel("$w_1$")
    axes.set_ylabel("$w_2$")


def _landmarks(axes: Axes, centres: list[Floats], best: Floats, start: Floats) -> None:
    marks = [(start, "o", "white", "start"), (best, "*", "#000000", "optimum")]
    marks += [(centre, "s", "#777777", f"client {i}") for i, centre in enumerate(centres, start=1)]
    middle = np.mean([point for point, *_ in marks], axis=0)
    for point, marker, face, name in marks:
        size = 9 if marker == "*" else 5.5
        axes.plot(*point, marker, color=face, markeredgecolor="black", markersize=size, zorder=5)
        # Outwards from the middle of them all, so that names of neighbours do not meet; the optimum's at its
        # side, because the ways come to it from all over.
        side = 0 if point is not best else 8
        level = (9 if point[1] >= middle[1] else -9) if point is not best else 7
        text = axes.annotate(name, (point[0], point[1]), (side, level), textcoords="offset points")
        text.set(fontsize=8, color=INK, zorder=6, ha="left" if side else "center", va="center")
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8})
